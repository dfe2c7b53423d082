"""Signs of hardware: events out of rows, their moments, what is derived into the store, a site's word on codes."""

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

from features.hardware_signs import SIGN_CODES, sign_events
from features.xids import XIDS, overridden
from pipelines.settings import IngestSettings, SettingsError, parse_settings
from pipelines.signs import TABLE, derive_signs, read_signs_of
from pipelines.silences import MINUTES
from pipelines.spans import TELEMETRY_MARK
from tests.store_child import open_store

START = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def rows(**columns) -> pl.DataFrame:
    n = max(len(values) for values in columns.values())
    return pl.DataFrame({"ts": [START + i * HOUR for i in range(n)], "node": "n1", "gpu_uuid": "A", **columns})


def told(events: pl.DataFrame) -> list:
    return [((ts - START) / HOUR, sign, amount, xid) for ts, sign, amount, xid in
            events.select("ts", "sign", "amount", "xid").iter_rows()]  # fmt: skip


def test_a_sign_is_known_when_its_row_is_over():
    events = sign_events(rows(ecc_uncorrected_total=[0.0, 0.0, 2.0]), span=HOUR)
    assert told(events) == [(3, "ecc", 2.0, None)]


def test_what_is_absent_tells_nothing():
    assert sign_events(rows(gpu_temp_c=[50.0, 90.0]), span=HOUR).is_empty()
    assert sign_events(rows(ecc_uncorrected_total=[None, None]), span=HOUR).is_empty()


def test_few_link_errors_are_everyday_life():
    assert told(sign_events(rows(nvlink_error_total=[0.0, 9.0, 30.0]), span=HOUR)) == [(3, "nvlink", 21.0, None)]


def test_codes_are_counted_although_the_last_one_stays():
    health = pl.DataFrame(
        {
            "ts": [START + timedelta(minutes=m) for m in (0, 10, 20, 30)], "node": "n1", "gpu_uuid": "A",
            "xid_counts": ["", "63=1+", "63=2+", "31=1+ 63=2+"],
        }
    )  # fmt: skip
    gauge = pl.DataFrame({"ts": health["ts"], "node": "n1", "gpu_uuid": "A", "xid_last": [0, 63, 63, 31]})
    events = sign_events(gauge, health, span=timedelta(minutes=1))
    assert events["xid"].to_list() == [63, 63]  # the second rise shows in no last code; 31 speaks of an application
    assert 31 not in SIGN_CODES
    assert 79 not in SIGN_CODES  # that one is the fault itself


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path) as opened:
        yield opened


def test_signs_are_derived_once_whatever_the_step(store):
    minute = [START + timedelta(minutes=m) for m in range(60)]
    whole = pl.DataFrame({"ts": minute, "cluster": "a", "node": "n1", "gpu_uuid": "A", "ecc_uncorrected_total": 0.0})
    failing = whole.with_columns(
        pl.lit("B").alias("gpu_uuid"),
        pl.when(pl.col("ts") >= minute[20]).then(3.0).otherwise(0.0).alias("ecc_uncorrected_total"),
    ).filter((pl.col("ts") < minute[40]) | (pl.col("ts") >= minute[44]))
    store.transact(lambda w: w.append(MINUTES, pl.concat([whole, failing])))
    store.transact(lambda w: w.set_mark("a", TABLE, START))
    for until in (25, 42, 43, 60):
        at = START + timedelta(minutes=until)
        store.transact(lambda w, at=at: [w.set_mark("a", name, at) for name in (TELEMETRY_MARK, MINUTES)])
        derive_signs(store, "a", IngestSettings(overlap_s=0))
    found = read_signs_of(store, "a", START, START + 2 * HOUR)
    assert [(row["gpu_uuid"], row["sign"], row["ts"], row["amount"]) for row in found.iter_rows(named=True)] == [
        ("B", "ecc", minute[21], 3.0),
        ("B", "silent", minute[42], 1.0),  # its host went on; a fault only after five minutes
    ]
    assert store.query("SELECT * FROM core_faults").is_empty()


def test_a_site_says_what_a_code_means():
    settings = parse_settings({"hardware": {"xid": {"63": {"action": "reset_gpu", "is_fatal": True},
                                                    "109": {"is_fatal": False}}}}, {})  # fmt: skip
    assert settings.derivation.xids_fatal_too == (63,)
    assert settings.derivation.xids_not_fatal == (109,)
    table = settings.hardware.table()
    assert (table[63].action, table[63].meaning, table[31]) == ("reset_gpu", XIDS[63].meaning, XIDS[31])
    assert overridden({9999: {"meaning": "ours"}})[9999].meaning == "ours"
    for wrong, words in (
        ({"63": {"action": "dance"}}, "'reset_gpu'"),
        ({"x": {}}, "whole number"),
        ({"063": {"is_fatal": True}}, "'063' is no XID code"),
        ({"٦٣": {"is_fatal": True}}, "whole number"),
        ({"63": {"fatal": True}}, "valid names: action, is_fatal, meaning"),
    ):
        with pytest.raises(SettingsError, match=words):
            parse_settings({"hardware": {"xid": wrong}}, {})
    both = {"hardware": {"xid": {"63": {"is_fatal": True}}}, "ingest": {"xids_not_fatal": [63]}}
    with pytest.raises(SettingsError, match="63 is called both fatal and not"):
        parse_settings(both, {})
    with pytest.raises(ValueError, match="actions: ignore"):
        overridden({63: {"action": "dance"}})
