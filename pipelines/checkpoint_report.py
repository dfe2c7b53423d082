"""What `weatherglass checkpoint-advice` reads and prints. The rules stand in `models/checkpointing.py`."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Any

from models.checkpointing import daly_interval_s, expected_loss, overhead_ratio, waste, young_interval_s
from models.interruptions import CLASSES, PRIOR_SOURCE, Interruptions, Rate, prior
from pipelines.compose import CommandError
from pipelines.job_evidence import measured_interruptions
from pipelines.settings import Settings
from pipelines.words import counted

GPUS_PER_NODE = 8
RULES_OF_THUMB_S = (3600.0, 7200.0)


def read_interruptions(settings: Settings, cluster: str | None, now: datetime) -> tuple[Interruptions, int | None, str]:
    """Failure rates measured on a cluster's jobs, its GPUs per node, and whose they are.

    Without any cluster in the settings the published rates speak.

    Raises:
        StoreError: There is no store yet, or it cannot be read.
    """
    from pipelines.compose import one_cluster, open_store

    if cluster is None and not settings.clusters:
        return prior(), None, "no cluster is configured"
    name = one_cluster(settings, cluster)
    with open_store(settings, read_only=True) as store:
        rates = measured_interruptions(store, name, now)
        usual = store.query(
            'SELECT gpus FROM core_nodes WHERE "cluster" = ? AND gpus > 0 GROUP BY gpus ORDER BY count(*) DESC, gpus '
            "LIMIT 1",
            [name],
        )
    return rates, int(usual["gpus"][0]) if usual.height else None, name


def advise_checkpoints(
    settings: Settings, cluster: str | None, now: datetime, *, gpus: int, checkpoint_s: float, restart_s: float,
    gpus_per_node: int | None, runtime: timedelta | None, as_json: bool,
) -> None:  # fmt: skip
    """Print how often a job of a size should write checkpoints, and what it is expected to lose.

    Raises:
        CommandError: The job is larger than any rate is known for.
        StoreError: There is no store yet, or it cannot be read.
    """
    rates, known, whose = read_interruptions(settings, cluster, now)
    per_node = gpus_per_node or known or GPUS_PER_NODE
    nodes = math.ceil(gpus / per_node)
    if nodes > CLASSES[-1][1]:
        raise CommandError(f"{gpus:,} GPUs are {nodes:,} nodes; {CLASSES[-1][1]:,} nodes at most")
    advice = checkpoint_advice(
        rates, nodes, gpus, checkpoint_s, restart_s, None if runtime is None else runtime.total_seconds()
    )
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode({"cluster": whose, **advice}), indent=2).decode())
    else:
        print("\n".join(advice_lines(advice, rates, whose)))


def checkpoint_advice(
    rates: Interruptions, nodes: int, gpus: int, checkpoint_s: float, restart_s: float, runtime_s: float | None
) -> dict[str, Any]:
    """The advice as plain values; times in seconds, waste in shares of the time of work and in GPU-hours.

    All that a rule costs is in its waste: checkpoints, rework and restarts, of a job that is started again until it is
    done.
    """
    mttf_s, low_s, high_s = rates.mttf_s(nodes)
    advised_s = daly_interval_s(checkpoint_s, mttf_s)
    rules = [
        ("Daly ÷ 2", advised_s / 2), ("Daly", advised_s), ("Daly × 2", 2 * advised_s),
        ("Young", young_interval_s(checkpoint_s, mttf_s)),
        *(("rule of thumb", interval_s) for interval_s in RULES_OF_THUMB_S),
    ]  # fmt: skip
    found = []
    for rule, interval_s in rules:
        parts = waste(interval_s, checkpoint_s, mttf_s, restart_s)
        row: dict[str, Any] = {
            "rule": rule, "interval_s": interval_s, "checkpoint_ratio": parts.checkpoints,
            "rework_ratio": parts.rework, "restart_ratio": parts.restarts, "overhead_ratio": parts.total,
            "lost_gpu_hours_per_day": gpus * 24 * (1 - 1 / (1 + parts.total)),
        }  # fmt: skip
        if runtime_s is not None:
            row["lost_gpu_hours_of_run"] = gpus * runtime_s / 3600 * parts.total
        found.append(row)
    return {
        "gpus": gpus, "nodes": nodes, "checkpoint_s": checkpoint_s, "restart_s": restart_s,
        "mttf_s": mttf_s, "mttf_low_s": low_s, "mttf_high_s": high_s,
        "interval_s": advised_s,
        "interval_low_s": daly_interval_s(checkpoint_s, low_s),
        "interval_high_s": daly_interval_s(checkpoint_s, high_s),
        "rules": found,
        "without_checkpoints": None if runtime_s is None else _without(runtime_s, gpus, mttf_s, restart_s),
    }  # fmt: skip


def _without(runtime_s: float, gpus: int, mttf_s: float, restart_s: float) -> dict[str, float]:
    """Of a run without checkpoints: what its first failure costs, and all of them until it gets through."""
    first = expected_loss(runtime_s, gpus, mttf_s, restart_s=restart_s)
    until_done = gpus * runtime_s / 3600 * overhead_ratio(runtime_s, 0.0, mttf_s, restart_s)
    return {
        "runtime_s": runtime_s, "p_failure": first.p_failure, "lost_gpu_hours_at_first_failure": first.lost_gpu_hours,
        "lost_gpu_hours_of_run": until_done,
    }  # fmt: skip


def advice_lines(advice: dict[str, Any], rates: Interruptions, whose: str) -> list[str]:
    """The advice as lines of text."""
    rate = rates.of_nodes(advice["nodes"])
    out = [f"{whose}: hardware failures of jobs by size"]
    if not rates.overall.node_days:
        out = [f"{whose}: no job was seen yet"]
    for (least, most), one in zip(CLASSES, rates.by_size, strict=True):
        if not one.node_days:
            continue
        size = f"{least}" if least == most else f"{least} to {most}" if most < CLASSES[-1][1] else f"from {least}"
        mark = "*" if one is rate else " "
        out.append(f" {mark} {size + (' node' if most == 1 else ' nodes'):<16} {_counted(one)}")
    out += [
        *([f"   {'all':<16} {_counted(rates.overall)}"] if rates.overall.node_days else []),
        f"   Where little was seen it leans on 4.0 per 1,000 node-days: {PRIOR_SOURCE}.",
        "",
        f"{counted(advice['gpus'], 'GPU')} on {counted(advice['nodes'], 'node')} fail every {span(advice['mttf_s'])} "
        f"(95 %: {span(advice['mttf_low_s'])} to {span(advice['mttf_high_s'])}), from "
        f"{1000 * rate.per_node_day:.3g} failures per 1,000 node-days",
        f"write a checkpoint every {span(advice['interval_s'])} of work (95 %: "
        f"{span(advice['interval_low_s'])} to {span(advice['interval_high_s'])})",
        "",
        "waste, as a share of the time of work: what checkpoints take, what failures undo, and restarts",
        f"  {'rule':<14} {'interval':>10} {'checkpoints':>11} {'rework':>8} {'restarts':>8} {'in all':>8} {'a day':>15}"
        + ("" if advice["without_checkpoints"] is None else f" {'of the run':>17}"),
    ]
    for row in advice["rules"]:
        line = f"  {row['rule']:<14} {span(row['interval_s']):>10} {row['checkpoint_ratio']:>11.2%} "
        line += f"{row['rework_ratio']:>8.2%} {row['restart_ratio']:>8.2%} {row['overhead_ratio']:>8.2%} "
        line += f"{row['lost_gpu_hours_per_day']:>9,.1f} GPU-h"
        if "lost_gpu_hours_of_run" in row:
            line += f" {_gpu_hours(row['lost_gpu_hours_of_run']):>17}"
        out.append(line)
    without = advice["without_checkpoints"]
    if without is not None:
        first, whole = (_gpu_hours(without[f"lost_gpu_hours_{part}"]) for part in ("at_first_failure", "of_run"))
        out += [
            f"  without any, a run of {span(without['runtime_s'])} is hit with probability {without['p_failure']:.3f};",
            f"  its first failure is expected to cost {first}, and begun anew until it gets through it wastes {whole}",
        ]
    return out


def _gpu_hours(value: float) -> str:
    return f"{value:,.1f} GPU-h" if value < 1e9 else "more than 10⁹ GPU-h"


def _counted(rate: Rate) -> str:
    seen = rate.counted
    if seen is None:
        return "nothing seen"
    value, low, high = (1000 * one for one in seen)
    return (
        f"{rate.failures:>5} in {rate.node_days:>12,.1f} node-days: {value:.3g} per 1,000 "
        f"(exact 95 %: {low:.3g} to {high:.3g})"
    )


def span(seconds: float) -> str:
    """A length of time in the unit that reads best."""
    if not math.isfinite(seconds):
        return "for ever"
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            length = seconds / size
            return f"{length:,.0f} {unit}" if length >= 100 else f"{length:.3g} {unit}"
    return f"{seconds:.3g} s"
