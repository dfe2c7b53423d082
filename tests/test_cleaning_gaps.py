"""Samples that are missing altogether, counted by the usual step of their series."""

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

from features.cleaning import clean_gpu_samples, clean_node_samples, clean_port_samples

T0 = datetime(2026, 11, 1, 12, tzinfo=UTC)
NOW = T0 + timedelta(hours=1)


def series(gpu: str, numbers: object, step_s: float = 15.0, offset_s: float = 0.0) -> pl.DataFrame:
    """Samples of one GPU at some of its steps, each a little late."""
    at = [T0 + timedelta(seconds=offset_s + step_s * i, milliseconds=i % 3 * 40) for i in numbers]  # ty: ignore
    return pl.DataFrame({"ts": at}).with_columns(
        cluster=pl.lit("a"), node=pl.lit(f"n-{gpu}"), gpu_uuid=pl.lit(gpu), gpu_temp_c=pl.lit(50.0, pl.Float32)
    )


def gaps(*frames: pl.DataFrame, **more: pl.DataFrame) -> list[tuple]:
    found = clean_gpu_samples(pl.concat(frames), NOW, **more)[1]
    assert set(found["reason"]) <= {"gap"}
    return found.select("column_name", "count", "example").rows()


WHOLE = series("A", range(20)), series("B", range(20), offset_s=7)


@pytest.mark.parametrize(
    ("frames", "missing"),
    [
        ((), 0),
        ((series("C", [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]),), 1),
        ((series("C", [*range(8), *range(12, 20)]),), 4),
        ((series("C", [*range(4), *range(5, 12), *range(14, 20)]), series("D", [*range(5), *range(7, 20)])), 5),
        ((series("C", range(15)),), 5),  # it fell silent
        ((series("C", range(9, 20)),), 0),  # it is new
        ((series("C", range(5), 60),), 0),  # slower, and nothing is missing
        ((series("C", [0, 1, 2, 4, 5], 60),), 1),
        ((series("C", [0, 12]),), 0),  # what its step is cannot be told
        ((series("C", range(20)), series("C", range(20), offset_s=1.5), series("C", range(20), offset_s=3)), 0),
    ],
)
def test_missing_samples_are_counted_by_the_series_own_step(frames: tuple, missing: int) -> None:
    assert gaps(*WHOLE, *frames) == ([("ts", missing, "a/n-C/C")] if missing else [])


def test_what_is_missing_over_an_edge_is_counted_once() -> None:
    holey = series("C", [*range(14), *range(25, 40)])
    edge = T0 + timedelta(seconds=300)
    both = pl.concat([series("A", range(40)), series("B", range(40)), holey])
    first, second = both.filter(pl.col("ts") < edge), both.filter(pl.col("ts") >= edge)
    near = first.filter(pl.col("ts") >= edge - timedelta(seconds=120))
    assert gaps(first) == [("ts", 6, "a/n-C/C")]
    assert gaps(second, history=near) == [("ts", 5, "a/n-C/C")]
    # One that is missing at the very edge is not yet late by the end of the first.
    edgy = pl.concat(
        [series("A", range(40), offset_s=-0.05), series("B", range(40)), series("C", [*range(20), *range(21, 40)])]
    )
    before, after = edgy.filter(pl.col("ts") < edge), edgy.filter(pl.col("ts") >= edge)
    counted = gaps(before), gaps(after, history=before.filter(pl.col("ts") >= edge - timedelta(seconds=60)))
    assert counted == ([], [("ts", 1, "a/n-C/C")])
    # Gone for good: at first only.
    gone = second.filter(pl.col("gpu_uuid") != "C")
    assert gaps(gone, history=near) == []
    assert gaps(gone, history=first.filter(pl.col("gpu_uuid") != "C")) == []


def test_of_a_past_that_is_imported_nothing_is_missing() -> None:
    frame = pl.concat([*WHOLE, series("C", [*range(8), *range(12, 20)])])
    assert clean_gpu_samples(frame)[1].is_empty()


def test_nodes_and_ports_have_gaps_too() -> None:
    holey = series("C", [*range(8), *range(12, 20)])
    nodes = pl.concat([*WHOLE, holey]).select("ts", "cluster", "node", inlet_temp_c=pl.lit(22.0))
    assert clean_node_samples(nodes, NOW)[1].rows() == [("ts", "gap", 4, "a/n-C")]
    ports = pl.concat([*WHOLE, holey]).select(
        "ts", "cluster", "node", device=pl.lit("mlx5_0"), port=pl.lit("1"),
        rx_bytes_total=pl.col("ts").dt.epoch("s") * 1e3,
    )  # fmt: skip
    assert clean_port_samples(ports, NOW)[1].rows() == [("ts", "gap", 4, "a/n-C/mlx5_0/1")]
