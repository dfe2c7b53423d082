"""Recorded telemetry as a source: windows, newest samples, and how the recording is wrong."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from features.cleaning import clean_gpu_samples
from pipelines.settings import Cluster
from pipelines.sources import SourceError, build_telemetry

T0 = datetime(2026, 11, 1, tzinfo=UTC)


def test_recorded_node_of_eight_gpus(traces: Path) -> None:
    path = traces / "telemetry" / "amd-mi300x-2025.parquet"
    source = build_telemetry("amd", Cluster(telemetry="trace", telemetry_path=str(path)), traces)
    whole = pl.read_parquet(path)
    first, last = whole["ts"].min(), whole["ts"].max()
    assert isinstance(first, datetime)
    assert isinstance(last, datetime)
    middle = first + (last - first) / 2
    parts = [source.fetch(first, middle), source.fetch(middle, last), source.fetch(last, last + timedelta(seconds=1))]
    assert sum(len(part.gpu) for part in parts) == len(whole)
    assert all((part.gpu["cluster"] == "amd").all() for part in parts)
    frame = pl.concat([part.gpu for part in parts])
    quantities = [name for name in frame.columns if name in whole.columns and name not in ("ts", "cluster")]
    joined = frame.join(whole, on=["ts", "gpu_uuid"], suffix="_recorded")
    assert len(joined) == len(whole)
    for name in quantities:
        if f"{name}_recorded" in joined.columns:
            assert joined[name].equals(joined[f"{name}_recorded"].cast(joined[name].dtype)), name
    newest = source.latest().gpu
    assert len(newest) == whole["gpu_uuid"].n_unique() == 8
    assert newest["ts"].max() == last
    assert all(ok for _, ok, _ in source.check())
    clean, quality = clean_gpu_samples(frame)
    assert len(clean) + quality.filter(pl.col("reason") == "duplicate")["count"].sum() == len(frame)


def test_node_columns_and_naive_times(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    times = [T0.replace(tzinfo=None) + timedelta(seconds=5 * k) for k in range(3) for _ in range(2)]
    pl.DataFrame(
        {"ts": times, "node": ["n1"] * 6, "gpu_uuid": ["g0", "g1"] * 3, "gpu_temp_c": list(range(6)),
         "inlet_temp_c": [25.0, None] * 3, "other": [1] * 6}
    ).write_parquet(path)  # fmt: skip
    source = build_telemetry("a", Cluster(telemetry="trace", telemetry_path=str(path)), tmp_path)
    fetched = source.fetch(T0 + timedelta(seconds=5), T0 + timedelta(seconds=10))
    assert fetched.gpu.select("ts", "cluster", "gpu_uuid", "gpu_temp_c").rows() == [
        (T0 + timedelta(seconds=5), "a", "g0", 2.0), (T0 + timedelta(seconds=5), "a", "g1", 3.0),
    ]  # fmt: skip
    assert fetched.node.rows() == [(T0 + timedelta(seconds=5), "a", "n1", 25.0, *[None] * 6)]
    assert source.latest().gpu["ts"].unique().to_list() == [T0 + timedelta(seconds=10)]


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    def source(path: Path):
        return build_telemetry("a", Cluster(telemetry="trace", telemetry_path=str(path)), tmp_path)

    with pytest.raises(SourceError, match=r"clusters\.a\.telemetry_path"):
        build_telemetry("a", Cluster(telemetry="trace"), tmp_path)
    with pytest.raises(SourceError, match=r"none\.parquet"):
        source(tmp_path / "none.parquet").latest()
    (tmp_path / "junk.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(SourceError, match=r"junk\.parquet"):
        source(tmp_path / "junk.parquet").latest()
    pl.DataFrame({"ts": [T0], "node": ["n1"]}).write_parquet(tmp_path / "few.parquet")
    with pytest.raises(SourceError, match="1 column missing: gpu_uuid"):
        source(tmp_path / "few.parquet").latest()
    assert [ok for _, ok, _ in source(tmp_path / "few.parquet").check()] == [True, False]
