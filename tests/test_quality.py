"""What is said of values that were not believed."""

import re
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from click.testing import CliRunner

from pipelines.ingest import ingest_telemetry
from pipelines.quality import in_lines, read_quality
from pipelines.settings import load_settings
from pipelines.store import Store, StoreMissing
from tests.pipelines_world import START, Recorded, ingest_settings, seconds
from tests.store_child import open_store
from weatherglass import cli


def ingested(store, start=START):
    source, settings = Recorded(), ingest_settings()
    wrong = (pl.col("gpu_uuid") == "GPU-00") & ((pl.col("ts") - START).dt.total_seconds() >= 300)
    source.edit = lambda frame: frame.with_columns(
        pl.when(wrong).then(345.0).otherwise("gpu_temp_c").cast(pl.Float32).alias("gpu_temp_c")
    )
    for after in (20, 920):
        ingest_telemetry(store, source, "alpha", settings, start + seconds(after))


def test_findings_are_summed_over_windows_with_their_share_and_times(tmp_path):
    with open_store(tmp_path) as store:
        ingested(store)
        found = read_quality(store, "alpha", START, START + seconds(900))
        assert found.row(0, named=True) == {
            "source": "telemetry", "table_name": "core_gpu_samples", "column_name": "gpu_temp_c",
            "reason": "out_of_range", "count": 40, "share": 40 / 240, "example": "alpha/n1/GPU-00",
            "first_seen": START + seconds(300), "last_seen": START + seconds(900),
        }  # fmt: skip
        assert found.height == 1
        later = read_quality(store, "alpha", START + seconds(600), START + seconds(900))
        assert later.select("count", "share").rows() == [(20, 20 / 80)]
        assert read_quality(store, "beta", START, START + seconds(900)).is_empty()
    lines = in_lines("alpha", found, START)
    assert lines[0] == "alpha: 1 finding since 2026-05-04 08:00 UTC"
    assert re.sub(" +", " ", lines[1]) == " count share column first seen (UTC) last seen (UTC) example"
    assert re.sub(" +", " ", lines[3]) == (
        " 40 16.67 % gpu_temp_c of core_gpu_samples 2026-05-04 08:05 2026-05-04 08:15 alpha/n1/GPU-00"
    )
    assert lines[4] == "      physically impossible, as 345 °C or a negative rate"
    assert in_lines("alpha", found.clear(), START) == ["alpha: nothing was found wrong since 2026-05-04 08:00 UTC"]


@pytest.mark.parametrize(
    ("reason", "table", "count", "share"),
    [
        ("no_samples", "raw_gpu_samples", 1, None),
        ("partial", "raw_gpu_samples", 1, None),
        ("sentinel", "core_gpu_health", 3, None),  # rows are a minute's, values are a scrape's
        ("sentinel", "no_table_any_more", 3, None),
        ("sentinel", "core_node_samples", 3, 0.75),
    ],
)
def test_a_share_is_only_told_where_there_is_one(tmp_path, reason, table, count, share):
    rows = pl.DataFrame({"window_start": [START], "window_end": [START + seconds(300)], "cluster": ["a"]})
    rows = rows.with_columns(
        source=pl.lit("telemetry"), table_name=pl.lit(table), column_name=pl.lit(""), reason=pl.lit(reason),
        count=pl.lit(count), example=pl.lit(None, pl.String),
    )  # fmt: skip
    nodes = pl.DataFrame({"ts": [START + seconds(60 * i) for i in range(4)], "cluster": ["a"] * 4, "node": ["n"] * 4})
    with open_store(tmp_path) as store:
        store.transact(lambda w: w.append("core_data_quality", rows))
        store.transact(lambda w: w.append("core_node_samples", nodes))
        found = read_quality(store, "a", START, START + seconds(300))
    assert found["share"].to_list() == [share]
    assert f"rows of {table}" in in_lines("a", found, START)[3]


def test_the_command_prints_the_last_day(tmp_path, monkeypatch):
    config = tmp_path / "weatherglass.toml"
    config.write_text(
        f'state_dir = "{tmp_path}"\n[clusters.alpha]\nprometheus_url = "http://127.0.0.1:1"\n', encoding="utf-8"
    )
    monkeypatch.setenv("WEATHERGLASS_CONFIG", str(config))
    with pytest.raises(StoreMissing, match="no store there yet"):
        CliRunner().invoke(cli, ["quality", "--since", "2h"], catch_exceptions=False)
    settings = load_settings()
    Store.open(settings.store_url, settings.store_data_path).close()
    told = CliRunner().invoke(cli, ["quality", "--since", "2h"], catch_exceptions=False)
    assert told.exit_code == 0
    assert told.stdout.startswith("alpha: nothing was found wrong since ")
    said = datetime.strptime(told.stdout.strip()[-20:-4], "%Y-%m-%d %H:%M").replace(tzinfo=UTC)
    assert timedelta(hours=1.9) < datetime.now(UTC) - said < timedelta(hours=2.1)
