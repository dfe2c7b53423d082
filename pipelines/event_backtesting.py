"""`weatherglass backtest {bottleneck,level,faults,idle}`: recorded files through the protocol, no settings needed.

Here belong which options go with which kind, reading the file and writing what comes out; not the protocols
(`models/onset_backtest.py`, `models/level_backtest.py`, `models/fault_backtest.py`, `models/idle_backtest.py`) and not
the page (`dashboards/event_page.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import polars as pl

from features.classes import GPU_CLASSES, HINT_CLASSES
from models.event_report import EventReport, finite
from pipelines.progress import Progress
from pipelines.separators import separator_of_file

KINDS = ("bottleneck", "level", "faults", "idle")
# Which files tell of a class; the first is the usual one.
CLASSES: dict[str, tuple[str, ...]] = {
    "shortage": ("occupancy",),
    "straggler": ("timeline", "telemetry"),
    **{name: ("telemetry",) for name in HINT_CLASSES if name not in ("shortage", "straggler")},
}
PREDICTIONS, REPORT, PAGE = "predictions.parquet", "report.json", "report.html"
_NAMES = ("cluster", "node", "gpu_uuid", "job_id", "device", "port")
# Columns of times; of other files `ts`.
_TIMES = {"timeline": (), "faults": ("start_time", "end_time", "event_time")}
_DEFAULT_HORIZONS = {"level": (30.0, 60.0, 120.0), "shortage": (120.0, 300.0)}


class EventBacktestError(ValueError):
    """Options do not fit together, or a file cannot be read; the message names what, and what is valid."""


class OutcomeError(RuntimeError):
    """The outcome cannot be written; the message names the folder and why."""


def run_event_backtest(
    kind: str,
    files: Mapping[str, Path | None],
    out: Path,
    *,
    bottleneck_class: str | None = None,
    quantity: str | None = None,
    horizons_s: tuple[float, ...] | None = None,
    gpu_model: str | None = None,
    nodes: int | None = None,
    seed: int = 1,
    threads: int = 1,
    refit_days: float | None = None,
) -> EventReport:
    """Backtest a file, write the three files of the outcome to a folder, and print the figures.

    Args:
        kind: One of `KINDS`.
        files: `telemetry` (samples of GPUs, of nodes for `host_memory`, of ports for `fabric_congestion`), `occupancy`,
            `timeline` and `faults` to a Parquet or CSV file, or None.
        out: Folder, made if needed; earlier outcomes in it are replaced.
        bottleneck_class: For `bottleneck`: one of `CLASSES`.
        quantity: For `level`: a column of the telemetry.
        horizons_s: For `level` and `shortage`: rising, seconds; None: the usual ones.
        gpu_model: For GPU classes: model whose limits hold where the file names none.
        nodes: For `faults`: nodes there are, with those that never faulted.
        seed: Seed of every random choice: the same seed writes the same predictions.
        threads: Threads of a fit; they change nothing but the time.
        refit_days: For `faults`, `shortage` and `idle`: days between fits; None: a week, one fit before the test, and a
            day.

    Raises:
        EventBacktestError: Options do not fit together, or a file cannot be read.
        ValueError: The file cannot be backtested; the message says why.
        OutcomeError: The folder cannot be written to.
    """
    wanted = _wanted_file(kind, bottleneck_class, quantity, files)
    _check_options(kind, wanted, files, bottleneck_class, quantity, horizons_s, gpu_model, nodes, refit_days)
    path = files[wanted]
    if path is None:
        subject = f" --class {bottleneck_class}" if bottleneck_class else ""
        raise EventBacktestError(f"backtest {kind}{subject} needs --{wanted} FILE")
    subject = bottleneck_class or quantity or {"idle": "idle GPUs"}.get(kind, "node faults")
    with Progress(f"backtest {kind}", "rows", part="part") as progress:
        progress.stage(f"reading {path.name}")
        frame = read_record(path, wanted)
        try:
            if kind == "level":
                from models.level_backtest import backtest_level

                report = backtest_level(
                    frame, subject, horizons_s=horizons_s or _DEFAULT_HORIZONS["level"], seed=seed, threads=threads,
                    step=progress.stage,
                )  # fmt: skip
            elif kind == "faults":
                from models.fault_backtest import backtest_faults

                report = backtest_faults(
                    frame,
                    nodes=nodes,
                    refit_days=refit_days or 7.0,
                    seed=seed,
                    step=progress.stage,
                    progress=_parts(progress),
                )
            elif kind == "idle":
                from models.idle_backtest import backtest_idle

                report = backtest_idle(frame, refit_days=refit_days, seed=seed, threads=threads, step=progress.stage)
            else:
                report = _bottleneck(
                    frame, wanted, subject, horizons_s, gpu_model, refit_days, seed, threads, progress.stage
                )
        except pl.exceptions.PolarsError as error:  # a column holds values of another kind: it says which
            said = str(error).partition("\n")[0]
            raise EventBacktestError(f"{path} cannot be read as {wanted}: {said}") from None
    write_outcome(report, out, {"file": path.name, "seed": seed}, path.stem)
    print(report.text())
    print(f"{report.predictions.height:,} predictions, figures and page in {out}: {PREDICTIONS}, {REPORT}, {PAGE}")
    return report


def _bottleneck(
    frame: pl.DataFrame,
    wanted: str,
    subject: str,
    horizons_s: tuple[float, ...] | None,
    gpu_model: str | None,
    refit_days: float | None,
    seed: int,
    threads: int,
    step: Callable[[str], None],
) -> EventReport:
    from models import onset_backtest

    if subject == "shortage":
        chosen = horizons_s or _DEFAULT_HORIZONS["shortage"]
        return onset_backtest.backtest_shortage(
            frame, horizons_s=chosen, refit_days=refit_days, seed=seed, threads=threads, step=step
        )
    if wanted == "timeline":
        return onset_backtest.backtest_straggler(frame, seed=seed, step=step)
    if subject not in GPU_CLASSES:
        from models.unit_onset_backtest import backtest_units

        return backtest_units(frame, subject, seed=seed, threads=threads, step=step)
    from models.gpu_onset_backtest import backtest_telemetry

    return backtest_telemetry(frame, subject, gpu_model=gpu_model, seed=seed, threads=threads, step=step)


def _parts(progress: Progress) -> Callable[[int, int], None]:
    return lambda done, total: progress(done, total, 1)


def _wanted_file(
    kind: str, bottleneck_class: str | None, quantity: str | None, files: Mapping[str, Path | None]
) -> str:
    """Which file a kind reads."""
    if kind not in KINDS:
        raise EventBacktestError(f"no backtest {kind!r}; there are: {', '.join(KINDS)}")
    if kind in ("faults", "idle"):
        return {"faults": "faults", "idle": "occupancy"}[kind]
    if kind == "level":
        if not quantity:
            raise EventBacktestError("backtest level needs --quantity NAME, a column of the telemetry, as gpu_power_w")
        return "telemetry"
    if not bottleneck_class:
        raise EventBacktestError(f"backtest bottleneck needs --class NAME, one of: {', '.join(CLASSES)}")
    if bottleneck_class not in CLASSES:
        raise EventBacktestError(f"no class {bottleneck_class!r}; classes: {', '.join(CLASSES)}")
    choices = CLASSES[bottleneck_class]
    return next((name for name in choices if files.get(name) is not None), choices[0])


def _check_options(
    kind: str,
    wanted: str,
    files: Mapping[str, Path | None],
    bottleneck_class: str | None,
    quantity: str | None,
    horizons_s: tuple[float, ...] | None,
    gpu_model: str | None,
    nodes: int | None,
    refit_days: float | None,
) -> None:
    """Refuse what does not go with the kind, naming it."""
    what = f"backtest {kind}" + (f" --class {bottleneck_class}" if kind == "bottleneck" else "")
    for name, path in files.items():
        if path is not None and name != wanted:
            raise EventBacktestError(f"--{name} does not go with {what}: it reads --{wanted}")
    allowed = {
        "--class": kind == "bottleneck",
        "--quantity": kind == "level",
        "--horizons": kind == "level" or bottleneck_class == "shortage",
        "--gpu-model": bottleneck_class in GPU_CLASSES and wanted == "telemetry",
        "--nodes": kind == "faults",
        "--refit-days": kind in ("faults", "idle") or bottleneck_class == "shortage",
    }
    given = {
        "--class": bottleneck_class, "--quantity": quantity, "--horizons": horizons_s, "--gpu-model": gpu_model,
        "--nodes": nodes, "--refit-days": refit_days,
    }  # fmt: skip
    for option, value in given.items():
        if value is not None and not allowed[option]:
            valid = ", ".join([f"--{wanted}", *(name for name, is_valid in allowed.items() if is_valid)])
            raise EventBacktestError(f"{option} does not go with {what}; it takes: {valid}, --out, --seed, --threads")
    if horizons_s is not None and not (
        horizons_s and list(horizons_s) == sorted(set(horizons_s)) and all(0 < value < math.inf for value in horizons_s)
    ):
        raise EventBacktestError(f"--horizons {_join(horizons_s)}: give rising seconds above 0, as 30,60,120")


def _join(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)


def parse_horizons(text: str) -> tuple[float, ...]:
    """Seconds of `30,60,120`.

    Raises:
        EventBacktestError: A part is no number.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise EventBacktestError(f"--horizons {text!r}: give seconds with commas between, as 30,60,120") from None


def read_record(path: Path, what: str) -> pl.DataFrame:
    """A Parquet or CSV file, times in UTC.

    Raises:
        EventBacktestError: It cannot be read.
    """
    try:
        is_csv = path.suffix.lower() == ".csv"
        if is_csv and (wrong := separator_of_file(path)):
            raise EventBacktestError(f"{path} cannot be read as {what}: {wrong}")
        frame = pl.read_csv(path, try_parse_dates=True) if is_csv else pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise EventBacktestError(f"{path} cannot be read as {what}: {error}") from None
    if not frame.height:
        raise EventBacktestError(f"{path} holds no rows")
    frame = _readable(frame, path, what)
    naive = [
        name for name, dtype in frame.schema.items() if isinstance(dtype, pl.Datetime) and dtype.time_zone != "UTC"
    ]
    return frame.with_columns(
        pl.col(name).dt.replace_time_zone("UTC")
        if frame.schema[name].time_zone is None  # ty: ignore[missing-attribute]
        else pl.col(name).dt.convert_time_zone("UTC")
        for name in naive
    ).with_columns(pl.col(pl.Datetime).dt.cast_time_unit("us"))


def _readable(frame: pl.DataFrame, path: Path, what: str) -> pl.DataFrame:
    """A value that is no finite number is not known; names of telemetry are text, where a CSV may hold numbers.

    Raises:
        EventBacktestError: A column of times holds none.
    """
    for name in _TIMES.get(what, ("ts",)):
        dtype = frame.schema.get(name, pl.Null())
        if not isinstance(dtype, (pl.Datetime, pl.Null)) and not (what == "faults" and dtype == pl.Date):
            words = f"{name} is {dtype}; it must be times, as 2026-01-31T12:00:00Z"
            raise EventBacktestError(f"{path} cannot be read as {what}: {words}")
    floats = pl.col(pl.Float32, pl.Float64)
    frame = frame.with_columns(pl.when(floats.is_finite()).then(floats))
    names = [name for name in _NAMES if frame.schema.get(name, pl.Null()) != pl.Null()]
    return frame.with_columns(pl.col(names).cast(pl.String)) if what == "telemetry" else frame


def write_outcome(report: EventReport, out: Path, facts: Mapping[str, object], title: str) -> None:
    """Write `predictions.parquet`, `report.json` and `report.html`, all of them or none.

    Raises:
        OutcomeError: The folder cannot be written to; what was there before is left as it was.
    """
    from dashboards.event_page import event_page

    body = json.dumps(finite({**report.to_json(), **facts}), indent=1)
    parts = {name: out / f"{name}.part" for name in (REPORT, PAGE, PREDICTIONS)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        parts[REPORT].write_text(body, encoding="utf-8")
        parts[PAGE].write_text(event_page(report, title), encoding="utf-8")
        report.predictions.write_parquet(parts[PREDICTIONS])
        for name, part in parts.items():
            part.replace(out / name)
    except (OSError, pl.exceptions.PolarsError) as error:
        with suppress(OSError):
            for part in parts.values():
                part.unlink(missing_ok=True)
        said = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise OutcomeError(f"the outcome cannot be written to {out}: {said}") from None
