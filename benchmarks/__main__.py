"""Runs the benchmarks and prints each figure beside its goal: `python -m benchmarks [NAME …]`.

A benchmark is a module here with `main() -> list[dict]`; each row has `name`, `value`, `unit`, `goal` (text, may be
empty) and `met` (true, false, or none where there is no goal). Nothing here asserts: figures are for reading.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
import time

ALL = ("store", "ingest", "remote_write", "nowcast", "units", "windows", "api", "simulator", "retrain", "dashboards")
LONG = ("soak",)  # of many minutes: run where they are named only


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main(arguments: list[str]) -> int:
    """Run the named benchmarks (default: all) one after another.

    Returns:
        0, or 2 for a name that is not one.
    """
    unknown = [name for name in arguments if name not in (*ALL, *LONG)]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join((*ALL, *LONG))}", file=sys.stderr)
        return 2
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {platform.machine()}")
    for name in arguments or ALL:
        began = time.perf_counter()
        rows = importlib.import_module(f"benchmarks.{name}").main()
        print(f"\n{name}  ({time.perf_counter() - began:.0f} s)")
        width = max((len(row["name"]) for row in rows), default=0)
        for row in rows:
            mark = {True: "met", False: "NOT met", None: ""}[row.get("met")]
            goal = f"goal {row['goal']}" if row.get("goal") else ""
            print(f"  {row['name']:<{width}}  {_number(row['value']):>12} {row['unit']:<14} {goal:<34} {mark}".rstrip())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
