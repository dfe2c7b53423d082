"""Energy counters that stand still: a powered board always draws.

Here belongs what is peculiar to energy; frozen gauges stand in `cleaning_series.py`, by whose figures both are judged.
"""

from __future__ import annotations

import polars as pl

from features.cleaning_findings import without
from features.cleaning_series import BOARD, FROZEN_COVERS, Earlier, long_runs

_ENERGY = "energy_total_j"


def without_frozen_energy(
    samples: pl.DataFrame,
    findings: list[pl.DataFrame],
    *,
    history: pl.DataFrame | None = None,
    earlier: Earlier | None = None,
) -> pl.DataFrame:
    """Energy counters that stand still for minutes become null.

    Args:
        samples: Rows of `core_gpu_health`, one a key.
        findings: Takes what was wrong.
        history: Rows right before, as they were before this judgement; they are read, not returned.
        earlier: Gives rows before those for some boards (`cluster`, `node`, `gpu_uuid`) as they are kept, which is
            after this judgement: a null there was found frozen.

    Returns:
        The samples, sorted by GPU and time.
    """
    rows = samples.with_columns(_is_past=False)
    if samples.is_empty() or samples[_ENERGY].null_count() == len(samples):
        return samples.sort("gpu_uuid", "ts")
    if history is not None and not history.is_empty():
        rows = pl.concat([history.select(samples.columns).with_columns(_is_past=True), rows])
    rows = rows.sort("gpu_uuid", "node", "ts")
    still = _still(rows)
    if still.any():
        run, holds = (~still).cum_sum(), still | still.shift(-1, fill_value=False)
        frozen = long_runs(rows, run, holds, FROZEN_COVERS)
        starts = ~rows.select(_same_board()).to_series()
        begun = holds & ~frozen & run.is_in(run.filter(starts & holds).implode())
        begun &= run.is_in(run.filter(begun & ~rows["_is_past"]).implode())
        if earlier is not None and begun.any():
            frozen = frozen.scatter(_followed_back(rows.with_row_index("_row").filter(begun), earlier), True)
        rows = without(rows, frozen & ~rows["_is_past"], _ENERGY, "frozen", findings)
    return rows.filter(~pl.col("_is_past")).select(samples.columns).sort("gpu_uuid", "ts")


def _same_board() -> pl.Expr:
    return pl.all_horizontal(pl.col(name) == pl.col(name).shift() for name in BOARD).fill_null(False)


def _still(rows: pl.DataFrame) -> pl.Series:
    same = _same_board() & (pl.col(_ENERGY) == pl.col(_ENERGY).shift())
    return rows.select(same.fill_null(False)).to_series()


def _followed_back(begun: pl.DataFrame, earlier: Earlier) -> pl.Series:
    """Rows (`_row`) of runs that are long with what came before them."""
    names = [*BOARD, "ts", _ENERGY]
    since = begun.group_by(BOARD).agg(pl.col("ts").min().alias("_since"))
    past = earlier(since.select("cluster", "node", "gpu_uuid")).select(names).join(since, on=BOARD)
    past = past.filter(pl.col("ts") < pl.col("_since")).select(names)
    both = pl.concat([past, begun.select(*names, "_row")], how="diagonal").sort("gpu_uuid", "node", "ts")
    both = both.with_columns(pl.col(_ENERGY).backward_fill().over(BOARD))
    still = _still(both)
    frozen = long_runs(both, (~still).cum_sum(), still | still.shift(-1, fill_value=False), FROZEN_COVERS)
    return both.filter(frozen)["_row"].drop_nulls()
