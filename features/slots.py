"""Slots: which board sat where on a node, and when, out of samples.

Indices move between boots and boards are swapped; a fault that stays with the slot speaks of the machine, one that
goes with the UUID of the board. Only this history belongs here. Pure functions of frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from features.vocabulary import TIME, conform, schema

_SLOT = ("cluster", "node", "slot")
_FACTS = ("gpu_index", "gpu_model", "driver_version", "vbios_version", "serial_number")
_BOARD = ("cluster", "gpu_uuid")


def slot_history(samples: pl.DataFrame, known: pl.DataFrame | None = None) -> pl.DataFrame:
    """Intervals of boards in slots.

    An interval ends when another board is seen in the slot, the board is seen in another slot or on another node, or
    its driver is another one. A board that falls silent stays where it was: that is a fault, no removal. Facts that a
    sample lacks are those of the samples before it in the interval.

    Args:
        samples: `ts`, `cluster`, `node`, `gpu_uuid`, and what there is of `slot` (the PCI bus id), `gpu_index`,
            `gpu_model`, `driver_version`, `vbios_version`, `serial_number`. Without a slot the index stands for it.
            Boards that have no UUID of their own (named `<node>:<index>`) and samples without any slot are passed over.
        known: Rows of `core_slots` so far, at least those that are open or ended after the first sample. Samples before
            the newest start of their slot or board are passed over: they have been judged.

    Returns:
        Rows of `core_slots`, sorted by node and slot: those that are new and those of `known` that ended or learned a
        fact. `end_time` is null while the board is there.

    Raises:
        ValueError: A key column is missing.
    """
    missing = [name for name in ("ts", "cluster", "node", "gpu_uuid") if name not in samples.columns]
    if missing:
        raise ValueError(f"slots need {', '.join(missing)}; the samples have: {', '.join(samples.columns)}")
    before = _empty() if known is None else conform(known, "core_slots")
    # An open interval is like a sample at its start.
    last = before.filter(pl.col("end_time").is_null()).rename({"start_time": "ts"}).drop("end_time")
    fresh = _sightings(samples)
    for keys in (_SLOT, _BOARD):  # what lies before a known start has been judged already
        starts = before.group_by(keys).agg(pl.col("start_time").max().alias("_since"))
        fresh = fresh.join(starts, on=keys, how="left", maintain_order="left")
        fresh = fresh.filter(pl.col("_since").is_null() | (pl.col("ts") >= pl.col("_since"))).drop("_since")
    sightings = pl.concat([last, fresh], how="diagonal").sort("ts", maintain_order=True)
    spans = _spans(_changes(sightings))
    return spans.join(before, on=spans.columns, how="anti", nulls_equal=True).sort(
        "cluster", "node", "slot", "start_time"
    )


def _empty() -> pl.DataFrame:
    return pl.DataFrame(schema=schema("core_slots"))


def _sightings(samples: pl.DataFrame) -> pl.DataFrame:
    types = schema("core_slots")
    facts = [
        (pl.col(name) if name in samples.columns else pl.lit(None)).cast(types[name]).alias(name) for name in _FACTS
    ]
    slot = pl.col("slot") if "slot" in samples.columns else pl.lit(None, dtype=pl.String)
    names = [pl.col(name).cast(pl.String) for name in ("cluster", "node", "gpu_uuid")]
    slot = slot.cast(pl.String).replace("", None).alias("slot")
    rows = samples.select(pl.col("ts").cast(TIME), *names, slot, *facts)
    rows = rows.with_columns(pl.col("slot").fill_null(pl.col("gpu_index").cast(pl.String)))
    own = ~pl.col("gpu_uuid").str.starts_with(pl.col("node") + ":") & (pl.col("gpu_uuid") != "")
    return rows.filter(own & pl.all_horizontal(pl.col(name).is_not_null() for name in ("ts", *_SLOT, "gpu_uuid")))


def _changes(sightings: pl.DataFrame) -> pl.DataFrame:
    """The sightings with `is_new`: an interval begins there."""
    driver = pl.col("driver_version").forward_fill().over(*_SLOT, "gpu_uuid")
    rows = sightings.with_columns(driver.alias("driver_version"))
    # Beside the slot before: what was seen last in this slot, and where this board was seen last.
    other_board = pl.col("gpu_uuid") != pl.col("gpu_uuid").shift().over(_SLOT)
    place = pl.concat_str("node", pl.lit("\n"), "slot")
    other_place = place != place.shift().over(_BOARD)
    was = pl.col("driver_version").shift().over(*_SLOT, "gpu_uuid")
    first = pl.int_range(pl.len()).over(_SLOT) == 0
    is_new = first | other_board.fill_null(True) | other_place.fill_null(False)
    is_new |= (pl.col("driver_version") != was).fill_null(False)
    return rows.with_columns(is_new.alias("is_new"))


def _spans(changes: pl.DataFrame) -> pl.DataFrame:
    number = pl.col("is_new").cast(pl.Int64).cum_sum().over(_SLOT).alias("_span")
    spans = (
        changes.with_columns(number)
        .group_by(*_SLOT, "gpu_uuid", "_span", maintain_order=True)
        .agg(pl.col("ts").min().alias("start_time"), *(pl.col(name).drop_nulls().last() for name in _FACTS))
        .sort("start_time", maintain_order=True)
    )
    # Gone when the slot has its next interval, or the board has its next one elsewhere.
    follows = pl.min_horizontal(pl.col("start_time").shift(-1).over(_SLOT), pl.col("start_time").shift(-1).over(_BOARD))
    return spans.with_columns(follows.alias("end_time")).select(schema("core_slots").keys())


def slot_of(frame: pl.DataFrame, slots: pl.DataFrame, facts: Sequence[str] = ()) -> pl.DataFrame:
    """The frame with the `slot` in which each board sat at that time.

    Args:
        frame: `ts`, `cluster`, `node`, `gpu_uuid` and whatever else.
        slots: Rows of `core_slots`.
        facts: Other columns of them to add, as `driver_version`; the frame has none of these names.

    Returns:
        The same rows in the same order with a column `slot` and the facts; null where no interval covers the time.
    """
    added = ["slot", *facts]
    spans = slots.select("cluster", "node", "gpu_uuid", "start_time", pl.col("end_time").alias("_end"), *added)
    rows = frame.with_row_index("_row").sort("ts")
    found = rows.join_asof(
        spans.sort("start_time"), left_on="ts", right_on="start_time", by=["cluster", "node", "gpu_uuid"],
        check_sortedness=False,
    )  # fmt: skip
    inside = pl.col("_end").is_null() | (pl.col("ts") < pl.col("_end"))
    found = found.with_columns(pl.when(inside).then(pl.col(name)).alias(name) for name in added)
    return found.sort("_row").select(*frame.columns, *added)


def without_removed(frame: pl.DataFrame, slots: pl.DataFrame) -> pl.DataFrame:
    """The rows of boards that are still where they were: what a board did before it was taken out speaks of it alone.

    Args:
        frame: `cluster`, `node`, `gpu_uuid` and whatever else.
        slots: Rows of `core_slots`, those that ended among them.

    Returns:
        The rows in their order without those of boards whose last interval on that node has ended. Boards without any
        interval stay.
    """
    board = ["cluster", "node", "gpu_uuid"]
    removed = slots.group_by(board).agg(pl.col("end_time").is_not_null().all().alias("_removed")).filter("_removed")
    return frame.join(removed, on=board, how="anti", maintain_order="left")
