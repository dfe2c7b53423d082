"""Counters and states: health of GPUs, single NVLinks, network ports; what they grew by."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.cleaning import (
    clean_health_samples,
    clean_link_samples,
    clean_port_samples,
    counter_deltas,
    health_minutes,
)
from features.vocabulary import COLUMNS, TABLES, schema

T0 = datetime(2026, 11, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def frame(table: str, *rows: dict[str, object], **keys: object) -> pl.DataFrame:
    keys = {"ts": T0, "cluster": "a", "node": "n1", **keys}
    return pl.DataFrame([{**keys, **row} for row in rows], schema=schema(table))


def health(*rows: dict[str, object]) -> pl.DataFrame:
    return frame("core_gpu_health", *rows, gpu_uuid="GPU-1")


def ports(*rows: dict[str, object]) -> pl.DataFrame:
    return frame("raw_port_samples", *rows, device="mlx5_0", port="1")


def reasons(quality: pl.DataFrame) -> dict[tuple[str, str], int]:
    return {(c, r): n for c, r, n, _ in quality.iter_rows()}


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("ecc_corrected_total", 2147483632.0, "sentinel"),
        ("ecc_corrected_total", 9223372036854775807.0, "sentinel"),
        ("ecc_corrected_total", 18446744073709551615.0, "sentinel"),  # all ones of 64 bits
        ("ecc_corrected_total", 4294967295.0, "saturated"),
        ("energy_total_j", 140737488355328.0 * 1e-3, "sentinel"),  # millijoules
        ("mem_copy_util_ratio", 655.35, "sentinel"),  # all ones of 16 bits, percent
        ("encoder_util_ratio", 9223372036854775794 * 0.01, "sentinel"),
        ("thermal_violation_s_total", 9223372036854775794 * 1e-9, "sentinel"),  # ns; 292 years are in bounds
        ("energy_total_j", 9223372036854776000 * 1e-3, "sentinel"),
        ("pcie_replay_total", -1.0, "out_of_range"),
        ("retired_pages_total", 4294967295.0, "sentinel"),
        ("pcie_link_width", 65535, "sentinel"),
        ("fp16_active_ratio", float("nan"), "not_a_number"),
        ("recovery_action", 77, "out_of_range"),
    ],
)  # fmt: skip
def test_impossible_health_is_null(column: str, value: float, reason: str) -> None:
    cleaned, quality = clean_health_samples(health({column: value, "is_remap_failed": True}))
    assert cleaned[column].to_list() == [None]
    assert cleaned["is_remap_failed"].to_list() == [True]
    assert reasons(quality) == {(column, reason): 1}
    assert quality["example"].to_list() == ["a/n1/GPU-1"]


def test_counts_beside_a_sentinel_are_counts() -> None:
    values = [2147483631.0, 2147483636.0, 2147483648.0, 65535.0, 4294967296.0]
    cleaned, quality = clean_health_samples(
        health(*({"ts": at(i), "ecc_corrected_total": v} for i, v in enumerate(values)))
    )
    assert cleaned["ecc_corrected_total"].to_list() == values
    assert quality.is_empty()


def test_energy_that_stands_still_is_null_and_a_reset_stays() -> None:
    rows = [{"ts": at(60 * i), "energy_total_j": 5e6} for i in range(6)]
    more = [{"ts": at(360 + 60 * i), "energy_total_j": 100.0 * i, "gpu_uuid": "GPU-1"} for i in range(5)]
    short = [{"ts": at(60 * i), "energy_total_j": 5e6, "gpu_uuid": "GPU-2"} for i in range(4)]
    cleaned, quality = clean_health_samples(health(*rows, *more, *short))
    mine = cleaned.filter(pl.col("gpu_uuid") == "GPU-1")["energy_total_j"].to_list()
    assert mine == [None] * 6 + [0.0, 100.0, 200.0, 300.0, 400.0]
    assert reasons(quality) == {("energy_total_j", "frozen"): 6}


def test_last_values_of_each_minute() -> None:
    rows = health(
        {"ts": at(5), "pcie_replay_total": 1.0, "energy_total_j": 10.0},
        {"ts": at(50), "pcie_replay_total": 2.0},
        {"ts": at(59.5), "is_remap_pending": True},
        {"ts": at(60), "pcie_replay_total": 3.0},
        {"ts": at(70), "pcie_replay_total": 9.0, "gpu_uuid": "GPU-0"},
    )
    minutes = health_minutes(rows)
    assert minutes.schema == rows.schema
    assert minutes.select("ts", "gpu_uuid", "pcie_replay_total").rows() == [
        (at(60), "GPU-0", 9.0), (at(0), "GPU-1", 2.0), (at(60), "GPU-1", 3.0),
    ]  # fmt: skip
    assert minutes.row(1, named=True)["energy_total_j"] == 10.0
    assert minutes.row(1, named=True)["is_remap_pending"] is True


def growth(values: list[float | None], **options: object) -> list[float | None]:
    rows = health(*({"ts": at(60 * i), "pcie_replay_total": v} for i, v in enumerate(values)))
    return counter_deltas(rows, ["pcie_replay_total"], **options)["pcie_replay_total_increase"].to_list()


def test_growth_of_counters() -> None:
    assert growth([5, 7, 7, 3, 4]) == [None, 2, 0, 3, 1]  # reset: it has counted 3 since
    assert growth([5, None, 7, 8]) == [None, None, None, 1]
    assert growth([4294967290, 4294967295, 4294967295, 10]) == [None, None, None, None]  # at its end
    assert growth([4294967290, 10]) == [None, 10]
    assert growth([4294967290, 10], wrap_at={"pcie_replay_total": 2**32}) == [None, 16]
    assert growth([1e9, 10], wrap_at={"pcie_replay_total": 2**32}) == [None, 10]  # far from its end: a reset
    assert growth([1, 2], max_gap=timedelta(seconds=59)) == [None, None]
    assert growth([]) == []
    with pytest.raises(ValueError, match="driver_version"):
        growth([1, 2], break_on=["driver_version"])


def test_growth_is_unknown_where_the_board_or_the_driver_changed() -> None:
    rows = pl.DataFrame(
        {
            "ts": [at(i) for i in range(7)],
            "slot": ["0000:8d:00.0"] * 7,
            "gpu_uuid": ["GPU-1", "GPU-1", "GPU-2", "GPU-2", "GPU-2", "GPU-2", "GPU-2"],
            "driver_version": ["550", "550", "550", None, "550", "570", "570"],
            "energy_total_j": [126272101.025, 126272105.0, 4.1, 5.1, 6.1, 7.1, 9.1],
        }
    )
    grown = counter_deltas(rows, ["energy_total_j"], keys=["slot"], break_on=["gpu_uuid", "driver_version"])
    assert grown["energy_total_j_increase"].to_list() == pytest.approx([None, 3.975, None, 1.0, 1.0, None, 2.0])
    # By board alone the reset of a driver load counts from 0.
    by_board = counter_deltas(rows.with_columns(gpu_uuid=pl.lit("GPU-1")), ["energy_total_j"], keys=["gpu_uuid"])
    assert by_board["energy_total_j_increase"].to_list()[2] == pytest.approx(4.1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(0, 1e12)), max_size=12))
def test_growth_is_never_negative(values: list[float | None]) -> None:
    assert all(increase is None or increase >= 0 for increase in growth(values))


def test_links() -> None:
    rows = frame(
        "core_link_samples",
        {"link": 0, "link_tx_bytes_per_s": 2e10, "link_error_total": 5.0, "is_link_up": True},
        {"link": 1, "link_tx_bytes_per_s": -1.0, "link_rx_bytes_per_s": 9223372036854776000.0, "is_link_up": False},
        {"link": None, "link_tx_bytes_per_s": 1e9},
        {"link": 0, "link_tx_bytes_per_s": None, "link_rx_bytes_per_s": 1e10},
        gpu_uuid="GPU-1",
    )
    cleaned, quality = clean_link_samples(rows)
    assert cleaned.schema == pl.Schema(schema("core_link_samples"))
    assert cleaned.select("link", "link_tx_bytes_per_s", "link_rx_bytes_per_s", "is_link_up").rows() == [
        (0, pytest.approx(2e10), pytest.approx(1e10), True), (1, None, None, False),
    ]  # fmt: skip
    assert reasons(quality) == {
        ("link", "no_key"): 1,
        ("link_rx_bytes_per_s", "sentinel"): 1,
        ("link_tx_bytes_per_s", "out_of_range"): 1,
        ("ts", "duplicate"): 1,
    }
    assert quality.filter(pl.col("reason") == "sentinel")["example"].to_list() == ["a/n1/GPU-1/1"]


def test_port_rates_are_over_the_real_interval() -> None:
    cleaned, quality = clean_port_samples(
        ports(
            {"ts": at(0), "tx_bytes_total": 1e12, "cnp_total": 100.0, "speed_bytes_per_s": 5e10, "is_link_up": True},
            {"ts": at(12.5), "tx_bytes_total": 1.25e12, "cnp_total": 110.0, "speed_bytes_per_s": 5e10},
            {"ts": at(22.5), "tx_bytes_total": 1e10, "cnp_total": 4.0, "speed_bytes_per_s": 5e10},
            {"ts": at(1822.5), "tx_bytes_total": 2e10, "cnp_total": 5.0, "link_downed_total": 3.0},
        )
    )
    assert cleaned.schema == pl.Schema(schema("core_port_samples"))
    assert cleaned["tx_bytes_per_s"].to_list() == pytest.approx([None, 2e10, 1e9, None])  # reset, then a silence
    assert cleaned["cnp_per_s"].to_list() == pytest.approx([None, 0.8, 0.4, None])
    assert cleaned["rx_bytes_per_s"].null_count() == 4
    assert cleaned["is_link_up"][0] is True
    assert cleaned["link_downed_total"][3] == 3
    assert quality.is_empty()


@pytest.mark.parametrize("behind_s", [[2.0], [2.0, 3.0, 4.5]])
def test_replicas_whose_clocks_differ_are_no_resets(behind_s: list[float]) -> None:
    # Each further replica stamps a second later what it read before the one ahead of it.
    rows = [
        {
            "ts": at(15 * i + r),
            "rx_bytes_total": 1e12 + 1e9 * (15 * i + r - s),
            "cnp_total": 1e6 + 100 * (15 * i + r - s),
        }
        for i in range(6)
        for r, s in enumerate([0.0, *behind_s])
    ]
    cleaned, quality = clean_port_samples(ports(*rows))
    assert cleaned["ts"].to_list() == [row["ts"] for row in rows]
    every = len(behind_s) + 1
    for name, rate in (("rx_bytes_per_s", 1e9), ("cnp_per_s", 100.0)):
        assert cleaned[name].gather_every(every).to_list() == pytest.approx([None] + [rate] * 5)
        assert cleaned[name].count() == 5
    assert reasons(quality) == {("ts", "late_reading"): 6 * len(behind_s)}


def test_a_counter_that_begins_anew_is_no_late_reading() -> None:
    values = [1e6, 1.0015e6, 300.0, 1800.0, 1800.0, 3300.0]
    rows = [{"ts": at(15 * i), "cnp_total": value} for i, value in enumerate(values)]
    cleaned, quality = clean_port_samples(ports(*rows))
    assert cleaned["cnp_per_s"].to_list() == pytest.approx([None, 100.0, 20.0, 100.0, 0.0, 100.0])
    assert quality.is_empty()


def test_a_port_counter_at_its_end_tells_nothing() -> None:
    flat = [{"ts": at(15 * i), "transmit_wait_total": 4294967295.0, "rx_bytes_total": 1e9 * i} for i in range(3)]
    cleaned, quality = clean_port_samples(ports(*flat))
    assert cleaned["transmit_wait_per_s"].to_list() == [None] * 3
    assert cleaned["rx_bytes_per_s"].to_list() == pytest.approx([None, 1e9 / 15, 1e9 / 15])
    assert quality.rows() == [("transmit_wait_total", "saturated", 3, "a/n1/mlx5_0/1")]


def test_a_rate_beyond_the_speed_of_the_port() -> None:
    rows = [{"ts": at(10 * i), "rx_bytes_total": 2e12 * i, "speed_bytes_per_s": 5e10} for i in range(2)]
    cleaned, quality = clean_port_samples(ports(*rows))
    assert cleaned["rx_bytes_per_s"].to_list() == [None, None]
    assert reasons(quality) == {("rx_bytes_per_s", "above_speed"): 1}
    # Without a speed the registry's bound holds.
    unknown = [{"ts": at(10 * i), "rx_bytes_total": 2e12 * i} for i in range(2)]
    assert clean_port_samples(ports(*unknown))[0]["rx_bytes_per_s"].to_list() == pytest.approx([None, 2e11])
    wild = [{"ts": at(10 * i), "rx_bytes_total": 2e14 * i} for i in range(2)]
    assert reasons(clean_port_samples(ports(*wild))[1]) == {("rx_bytes_per_s", "out_of_range"): 1}


def test_ports_do_not_mix_and_duplicates_merge() -> None:
    rows = [
        {"ts": at(10 * i), "port": port, "tx_bytes_total": start + 1e9 * i}
        for i in range(3)
        for port, start in (("1", 0.0), ("2", 7e12), ("2", 7e12))
    ]
    cleaned, quality = clean_port_samples(ports(*rows))
    assert cleaned["port"].to_list() == ["1"] * 3 + ["2"] * 3
    assert cleaned["tx_bytes_per_s"].to_list() == pytest.approx([None, 1e8, 1e8] * 2)
    assert reasons(quality) == {("ts", "duplicate"): 3}


@pytest.mark.parametrize(
    ("clean", "table", "out"),
    [
        (clean_health_samples, "core_gpu_health", "core_gpu_health"),
        (clean_link_samples, "core_link_samples", "core_link_samples"),
        (clean_port_samples, "raw_port_samples", "core_port_samples"),
    ],
)
def test_nothing_in_nothing_out(clean, table: str, out: str) -> None:
    cleaned, quality = clean(pl.DataFrame(schema=schema(table)), T0)
    assert cleaned.schema == pl.Schema(schema(out))
    assert cleaned.is_empty()
    assert quality.is_empty()


ODD = st.one_of(
    st.none(),
    st.floats(),
    st.sampled_from([2147483632.0, 4294967295.0, 2.0**63, 2.0**64, 2.0**47, 65535.0, -1.0, 0.0, 1.0, 5e10]),
)
TABLES_OF = {
    "core_gpu_health": (clean_health_samples, {"gpu_uuid": ["GPU-1", "GPU-2", ""]}),
    "core_link_samples": (clean_link_samples, {"gpu_uuid": ["GPU-1", None], "link": [0, 1, None]}),
    "raw_port_samples": (clean_port_samples, {"device": ["mlx5_0", ""], "port": ["1", "2"]}),
}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TABLES_OF)), st.data())
def test_whatever_comes_in_what_goes_out_is_possible(table: str, data: st.DataObject) -> None:
    clean, keys = TABLES_OF[table]
    floats = [name for name, dtype in schema(table).items() if dtype.is_float()]
    row = st.fixed_dictionaries(
        {"ts": st.integers(-3, 30).map(lambda i: at(15 * i)), **{k: st.sampled_from(v) for k, v in keys.items()}},
        optional=dict.fromkeys(floats, ODD),
    )
    rows = data.draw(st.lists(row, max_size=8))
    cleaned, quality = clean(frame(table, *rows) if rows else pl.DataFrame(schema=schema(table)), T0)
    assert cleaned.height <= len(rows)
    assert (quality["count"] > 0).all()
    for name in cleaned.columns:
        column, values = COLUMNS[name], cleaned[name].drop_nulls()
        if column.dtype.is_float():
            assert values.is_finite().all(), name
            assert column.low is None or (values >= column.low).all(), name
            assert column.high is None or (values.cast(pl.Float64) <= column.high).all(), name
    key = [name for name in TABLES[table].key if name in cleaned.columns]
    assert cleaned.select(key).is_duplicated().sum() == 0
    if table == "core_gpu_health":
        assert health_minutes(cleaned).height <= cleaned.height
