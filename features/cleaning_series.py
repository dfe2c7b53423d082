"""Courses over time that cannot be true: frozen values, counters stuck at 0 while the GPU works, a rate's first 0.

What several samples of one GPU tell about each other belongs here; single values stand in `cleaning_bounds.py`. What
is short is left alone: a pause of traffic or a steady minute is no fault of an exporter. Whole frames are judged here;
a sample at a time, as the nowcast reads them, in `cleaning_live.py` by the same figures.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import polars as pl

from features.cleaning_findings import count, without
from features.cleaning_gaps import count_gaps
from features.vocabulary import GPU_KEYS, GPU_QUANTITIES

# Samples of one condition in a row, and the time that they cover, before it is called one: a minute, and five of frozen
# values, less what trembling times of scrapes and a scrape that was missed take from it.
SAMPLES = 3
COVERS = timedelta(seconds=57)
FROZEN_COVERS = timedelta(minutes=4, seconds=30)
EARLIER = timedelta(minutes=5)  # how far before the history a run has to be followed to be called frozen
BUSY_ACTIVITY, BUSY_UTIL, BUSY_POWER = 0.3, 0.5, 0.5
# After a silence this long a rate that an exporter makes of counters begins anew.
SILENCE = timedelta(seconds=90)
_NVLINK = ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")
_PCIE = ("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s")
PROFILING = ("engine_active_ratio", "sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")
GAUGES = (
    "gpu_util_ratio", *PROFILING, "fb_used_bytes", "gpu_power_w", "gpu_temp_c", "mem_temp_c", "gpu_temp_margin_c",
    "sm_clock_hz", "mem_clock_hz", *_NVLINK, *_PCIE,
)  # fmt: skip
BOARD = ("gpu_uuid", "node", "cluster")
OF_THE_JOB = ("step_time_s", "own_step_time_s")  # the job's own word, which no exporter of GPUs can freeze


Earlier = Callable[[pl.DataFrame], pl.DataFrame]


def judged(
    samples: pl.DataFrame,
    history: pl.DataFrame | None,
    findings: list[pl.DataFrame],
    *,
    earlier: Earlier | None = None,
    revised: list[pl.DataFrame] | None = None,
    gaps: bool = False,
) -> pl.DataFrame:
    """Samples without the values that their course refutes.

    Args:
        samples: Rows of `core_gpu_samples`, one a key, values bounded.
        history: Earlier rows of the same table, as they were before this judgement; they are read, not returned. With a
            history a GPU that is not in it counts as new (each with an empty one); None: nothing is known of before.
        findings: Takes what was wrong.
        earlier: Gives rows of `EARLIER` before the history for some GPUs (`cluster`, `node`, `gpu_uuid`); asked only
            for those whose values rest from the first row on.
        revised: Takes the keys of rows of the history, and earlier, that are found frozen now.
        gaps: Whether samples that are missing are counted.

    Returns:
        The samples, sorted by GPU and time.
    """
    rows = samples.select(*GPU_KEYS, *GPU_QUANTITIES)
    if history is not None and not history.is_empty():
        past = history.select(rows.columns)
        rows = pl.concat([past.with_columns(_is_past=True), rows.with_columns(_is_past=False)])
    else:
        rows = rows.with_columns(_is_past=False)
    rows = rows.sort("gpu_uuid", "ts")
    starts = _starts(rows)
    found: list[pl.DataFrame] = []
    rows = _frozen(rows, starts, found, earlier, revised)
    for judge in (_stuck, _silent):
        rows = judge(rows, starts, found)
    new = _new(rows, starts) if history is not None else pl.Series([False])
    rows = _first_of_rate(rows, starts, new, found)
    if gaps:
        count_gaps(rows, starts, found)
    findings += found
    return rows.filter(~pl.col("_is_past")).drop("_is_past")


def _starts(rows: pl.DataFrame) -> pl.Series:
    """First rows of GPUs; a board that was moved begins anew."""
    first = pl.any_horizontal(pl.col(name) != pl.col(name).shift() for name in BOARD)
    return rows.select(first.fill_null(True)).to_series()


def _value(rows: pl.DataFrame, expression: pl.Expr) -> pl.Series:
    return rows.select(expression.fill_null(False)).to_series()


def _busy() -> pl.Expr:
    active = pl.max_horizontal("sm_active_ratio", "engine_active_ratio") >= BUSY_ACTIVITY
    return active.fill_null(False) | (pl.col("gpu_util_ratio") >= BUSY_UTIL).fill_null(False)


def long_runs(rows: pl.DataFrame, run: pl.Series, holds: pl.Series, covers: timedelta) -> pl.Series:
    """Rows that hold and stand in a run which is long enough.

    A run of n samples covers n of its own mean steps: twenty samples every 15 s cover five minutes.
    """
    if not holds.any():
        return holds
    lengths = (
        pl.DataFrame({"run": run, "ts": rows["ts"], "holds": holds})
        .filter("holds")
        .group_by("run")
        .agg(pl.len().alias("n"), (pl.col("ts").max() - pl.col("ts").min()).alias("span"))
        .filter((pl.col("n") >= SAMPLES) & (pl.col("span") * pl.col("n") / (pl.col("n") - 1) >= covers))
    )
    return holds & run.is_in(lengths["run"].implode())


def _frozen(
    rows: pl.DataFrame,
    starts: pl.Series,
    found: list[pl.DataFrame],
    earlier: Earlier | None,
    revised: list[pl.DataFrame] | None,
) -> pl.DataFrame:
    """Power, temperature, clocks, memory, activity: nothing at all moves for minutes while the GPU is said to work."""
    still = _value(rows, (pl.col("gpu_power_w") == pl.col("gpu_power_w").shift()) & _busy()) & ~starts
    # The cheap look first: the power that a working board draws never rests for long.
    lengths = still.rle().struct.unnest()
    may_reach_back = earlier is not None and (still & starts.shift(1, fill_value=False)).any()
    if not may_reach_back and not (lengths["value"] & (lengths["len"] >= SAMPLES - 1)).any():
        return rows
    still &= _rests(rows)
    # An exporter slower than its scraper repeats each value some times: every value is a run of its own.
    run, holds = (~still).cum_sum(), still | still.shift(-1, fill_value=False)
    frozen = long_runs(rows, run, holds, FROZEN_COVERS)
    before = rows.clear()
    if earlier is not None and (starts & holds).any():
        begun = holds & run.is_in(run.filter(starts & holds).implode())
        begun &= run.is_in(run.filter(begun & ~rows["_is_past"]).implode())
        if begun.any():
            more, before = _followed_back(rows.with_row_index("_row").filter(begun), earlier)
            frozen = frozen.scatter(more, True)
    if not frozen.any():
        return rows
    if revised is not None:
        past = (rows.filter(frozen & rows["_is_past"]), before)
        revised += [part.select("cluster", "node", "gpu_uuid", "ts") for part in past]
    found.append(count(rows.filter(frozen & ~rows["_is_past"]), "ts", "frozen"))
    names = [name for name in GPU_QUANTITIES if name not in OF_THE_JOB]
    return rows.with_columns(pl.when(~frozen).then(pl.col(name)).alias(name) for name in names)


def _rests(rows: pl.DataFrame) -> pl.Series:
    """No gauge differs from the row before, and some stand beside power."""
    same = pl.all_horizontal(pl.col(name).eq_missing(pl.col(name).shift()) for name in GAUGES)
    beside = pl.any_horizontal(pl.col("gpu_temp_c", "sm_clock_hz", "fb_used_bytes").is_not_null())
    return _value(rows, same & beside)


def _followed_back(begun: pl.DataFrame, earlier: Earlier) -> tuple[pl.Series, pl.DataFrame]:
    """Rows (`_row`) of runs that are long with what came before them, and the rows before that belong to them."""
    names = [name for name in begun.columns if name not in ("_row", "_is_past")]
    since = begun.group_by(BOARD).agg(pl.col("ts").min().alias("_since"))
    past = earlier(since.select("cluster", "node", "gpu_uuid")).select(names).join(since, on=BOARD)
    past = past.filter(pl.col("ts") < pl.col("_since")).select(names)
    both = pl.concat([past, begun.drop("_is_past")], how="diagonal").sort("gpu_uuid", "ts")
    rests = _value(both, (pl.col("gpu_power_w") == pl.col("gpu_power_w").shift()) & _busy()) & _rests(both)
    still = rests & ~_starts(both)
    run = (~still).cum_sum()
    frozen = long_runs(both, run, still | still.shift(-1, fill_value=False), FROZEN_COVERS)
    frozen &= run.is_in(run.filter(both["_row"].is_not_null()).implode())
    return both.filter(frozen)["_row"].drop_nulls(), both.filter(frozen & both["_row"].is_null())


def _stuck(rows: pl.DataFrame, starts: pl.Series, found: list[pl.DataFrame]) -> pl.DataFrame:
    """Profiling counters that stay at 0 while utilisation or power say that the GPU works."""
    if rows["engine_active_ratio"].null_count() == len(rows):
        return rows
    works = (pl.col("gpu_util_ratio") >= BUSY_UTIL).fill_null(False) | (
        pl.col("gpu_power_w") >= BUSY_POWER * pl.col("power_limit_w")
    ).fill_null(False)
    holds = _value(rows, (pl.col("engine_active_ratio") == 0) & works)
    stuck = long_runs(rows, ((holds != holds.shift()) | starts).fill_null(True).cum_sum(), holds, COVERS)
    for name in PROFILING if stuck.any() else ():
        rows = _nulled(rows, stuck & (rows[name] == 0).fill_null(False), name, "stuck", found)
    return rows


def _silent(rows: pl.DataFrame, starts: pl.Series, found: list[pl.DataFrame]) -> pl.DataFrame:
    """Traffic that is 0 in both directions in every sample of a GPU, many of them under load."""
    for names in (_NVLINK, _PCIE):
        most = pl.max_horizontal(names)
        loaded = _value(rows, (most == 0) & _busy())
        if names == _NVLINK and loaded.any():
            loaded &= ~_alone(rows)
        if not loaded.any():
            continue
        board = starts.cum_sum()
        boards = (
            pl.DataFrame({"board": board, "ts": rows["ts"], "loaded": loaded, "most": rows.select(most).to_series()})
            .group_by("board")
            .agg(
                pl.col("most").max(),
                pl.col("loaded").sum().alias("n"),
                (pl.col("ts").filter("loaded").max() - pl.col("ts").filter("loaded").min()).alias("span"),
            )
            .filter((pl.col("most") == 0) & (pl.col("n") >= SAMPLES))
            .filter(pl.col("span") * pl.col("n") / (pl.col("n") - 1) >= COVERS)
        )
        dead = board.is_in(boards["board"].implode())
        for name in names if dead.any() else ():
            rows = _nulled(rows, dead, name, "zero_under_load", found)
    return rows


def _alone(rows: pl.DataFrame) -> pl.Series:
    """Rows of jobs that have one GPU: they have nobody to talk to over NVLink."""
    gpus = rows.group_by("cluster", "job_id").agg(pl.col("gpu_uuid").n_unique().alias("_gpus"))
    beside = rows.select("cluster", "job_id").join(gpus, on=["cluster", "job_id"], how="left", maintain_order="left")
    return _value(beside, pl.col("_gpus") == 1)  # of a job that is not known (null) no count is found


def _new(rows: pl.DataFrame, starts: pl.Series) -> pl.Series:
    """First rows of GPUs that the history would have shown had they been there: it reaches back two of their steps."""
    earliest = rows.filter(pl.col("_is_past"))["ts"].min()
    if earliest is None:
        return starts
    step = pl.col("ts").shift(-1) - pl.col("ts")
    return starts & _value(rows, pl.col("ts") - earliest >= 2 * step)


def _first_of_rate(rows: pl.DataFrame, starts: pl.Series, new: pl.Series, found: list[pl.DataFrame]) -> pl.DataFrame:
    """The 0 with which a rate begins that the exporter makes of two readings of a counter.

    Told from a real 0 by what stands around it: nothing before (a new GPU, a silence, nulls), traffic right after.
    """
    most = pl.max_horizontal(_NVLINK)
    zero = _value(rows, most == 0)
    if not zero.any():
        return rows
    begins = (pl.col("ts") - pl.col("ts").shift() > SILENCE) | most.shift().is_null()
    first = (_value(rows, begins) & ~starts) | new
    follows = _value(rows, most.shift(-1) > 0) & ~starts.shift(-1, fill_value=True)
    for name in _NVLINK:
        rows = _nulled(rows, zero & first & follows, name, "first_of_rate", found)
    return rows


def _nulled(rows: pl.DataFrame, bad: pl.Series, name: str, reason: str, found: list[pl.DataFrame]) -> pl.DataFrame:
    """Null where `bad`; only rows that will be returned are counted."""
    return without(rows, bad & ~rows["_is_past"], name, reason, found)
