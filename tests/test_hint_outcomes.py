"""Published bottleneck hints beside the labels of their scope: what became of each, precision, recall, lead, drift."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from features.vocabulary import schema
from models.hint_scores import MIN_HINTS, Said, caught, drifted, hint_scores, hint_words, judge_hints
from pipelines.hint_outcomes import TABLE, read_hints, score_hints
from pipelines.outcomes import publish_outcomes, score_outcomes
from pipelines.publish import hint_rows
from pipelines.store import Store
from scheduler_hints.outcome_gauges import decode_word, outcomes_path
from scheduler_hints.schema import Bottleneck, Snapshot
from tests.hints_support import bottleneck

UNTIL = datetime(2026, 11, 5, tzinfo=UTC)
T0 = UNTIL - timedelta(hours=12)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def said(name: str = "b1", **changes: Any) -> Said:
    fields: dict[str, Any] = {
        "hint_id": name, "bottleneck_class": "thermal_throttle", "scope": "gpu", "gpu_uuid": "GPU-1", "nodes": ("n1",),
        "unit": None, "visible_at": at(0), "claimed_until": at(120), "horizon_s": 60, "probability": 0.7,
        "model_version": "m1", "is_held_out": False,
    }  # fmt: skip
    return Said(**(fields | changes))


def labels(*rows: tuple[Any, ...]) -> pl.DataFrame:
    """Class, scope id, node, GPU, second of the onset, whether it is censored."""
    types = {name: schema("feat_labels")[name] for name in
             ("bottleneck_class", "scope_id", "node", "gpu_uuid", "onset_time", "is_censored")}  # fmt: skip
    return pl.DataFrame([(*row[:4], at(row[4]), row[5]) for row in rows], schema=types, orient="row")


HEAT, PORT = "thermal_throttle", "fabric_congestion"


def spans(*rows: tuple[Any, ...]) -> pl.DataFrame:
    time = pl.Datetime("us", "UTC")
    types = {"node": pl.String, "bottleneck_class": pl.String, "start": time, "end": time}
    return pl.DataFrame([(*row[:2], at(row[2]), at(row[3])) for row in rows], schema=types, orient="row")


@pytest.mark.parametrize(
    ("changes", "rows", "excluded", "is_watched", "fate", "reason"),
    [
        ({}, [(HEAT, "GPU-1", "n1", "GPU-1", 50, False)], [], True, "true", ""),
        ({}, [(HEAT, "GPU-1", "n1", "GPU-1", 120, False)], [], True, "true", ""),
        ({}, [(HEAT, "GPU-1", "n1", "GPU-1", 121, False)], [], True, "false", "no onset"),
        ({}, [(HEAT, "GPU-2", "n1", "GPU-2", 50, False)], [], True, "false", "no onset"),  # another GPU
        ({}, [("nvlink_saturation", "GPU-1", "n1", "GPU-1", 50, False)], [], True, "false", "no onset"),
        ({}, [(HEAT, "GPU-1", "n1", "GPU-1", 0, False)], [], True, "false", "late"),  # it had begun
        ({}, [(HEAT, "GPU-1", "n1", "GPU-1", 50, True)], [], True, "censored", "its label is unknown"),
        ({}, [], [("n1", None, -60, 10)], True, "censored", "acted on, silenced or out of service"),
        ({}, [], [(None, HEAT, 100, 900)], True, "censored", "acted on, silenced or out of service"),
        ({}, [], [("n1", "straggler", 0, 900), ("n2", None, 0, 900)], True, "false", "no onset"),
        ({}, [(HEAT, "GPU-1", "n1", "GPU-1", 50, False)], [("n1", None, 0, 900)], True, "true", ""),  # all the same
        ({}, [], [], False, "censored", "telemetry had a gap"),
        ({"scope": "rack", "gpu_uuid": None, "nodes": ("n1", "n2")}, [(HEAT, "GPU-9", "n2", "GPU-9", 9, False)], [],
         True, "true", ""),
        ({"bottleneck_class": PORT, "scope": "node", "gpu_uuid": None},
         [(PORT, "n1/mlx5_0/1", "n1", None, 9, False)], [], True, "true", ""),
        ({"bottleneck_class": "shortage", "scope": "queue", "gpu_uuid": None, "nodes": (), "unit": "batch"},
         [("shortage", "batch", None, None, 9, False)], [], True, "true", ""),
        ({"bottleneck_class": "shortage", "scope": "queue", "gpu_uuid": None, "nodes": (), "unit": "debug"},
         [("shortage", "batch", None, None, 9, False)], [], True, "false", "no onset"),
    ],
)  # fmt: skip
def test_what_becomes_of_a_hint(
    changes: dict[str, Any], rows: list[Any], excluded: list[Any], is_watched: bool, fate: str, reason: str
) -> None:
    (judged,) = judge_hints([said(**changes)], labels(*rows), spans(*excluded), lambda _: is_watched)
    assert (judged.fate, judged.reason) == (fate, reason)
    assert (judged.lead_s is None) == (fate != "true")
    if fate == "true":
        assert judged.lead_s == rows[0][4]


def test_recall_is_over_all_labelled_onsets() -> None:
    found = caught(
        labels(
            (HEAT, "GPU-1", "n1", "GPU-1", 50, False), (HEAT, "GPU-1", "n1", "GPU-1", 900, False),
            (HEAT, "GPU-2", "n2", "GPU-2", 50, False), (HEAT, "GPU-1", "n1", "GPU-1", 60, True),
        ),
        [said(), said("b2", visible_at=at(20)),
         said("b3", scope="node", gpu_uuid=None, nodes=("n2",), visible_at=at(50))],
    )  # fmt: skip
    assert found.select("is_caught", "lead_s").rows() == [(True, 50.0), (False, None), (False, None)]


def outcomes(
    *fates: str, class_: str = HEAT, lead_s: float = 60.0, held: bool = False, begin: float = 0
) -> pl.DataFrame:
    rows = [
        {
            "generated_at": at(begin + i), "cluster": "c", "hint_id": f"{class_}{begin}{i}", "bottleneck_class": class_,
            "scope": "gpu", "is_held_out": held, "verdict": fate, "lead_s": lead_s if fate == "true" else None,
        }
        for i, fate in enumerate(fates)
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=schema(TABLE))


def test_figures_by_hand() -> None:
    rows = pl.concat([
        outcomes("true", "true", "true", "false", "censored"),
        outcomes("true", "false", class_=PORT, lead_s=30, held=True),
    ])  # fmt: skip
    onsets = caught(labels((HEAT, "GPU-1", "n1", "GPU-1", 50, False), (PORT, "p", "n9", None, 50, False)), [said()])
    found = {score.metric: (round(score.interval.value, 3), score.count) for score in hint_scores(rows, onsets)}
    assert found["precision"] == (0.667, 6)
    assert found[f"precision_{HEAT}"] == (0.75, 4)
    assert found["held_out_precision"] == found[f"precision_{PORT}"] == (0.5, 2)
    assert found["recall"] == (0.5, 2)
    assert found[f"recall_{PORT}"] == (0.0, 1)
    assert found["censored_share"] == (0.143, 7)
    assert found[f"lead_median_s_{HEAT}"] == (60.0, 3)
    words = hint_words(hint_scores(rows, onsets))
    assert words == [
        "fabric_congestion: 50% of 2 hints came true, 0% of 1 onsets had been foreseen, 30 s ahead (median)",
        "thermal_throttle: 75% of 4 hints came true, 100% of 1 onsets had been foreseen, 60 s ahead (median)",
    ]
    (whole,) = [score for score in hint_scores(rows, onsets) if score.metric == "precision"]
    assert whole.interval.low == pytest.approx(0.300, abs=0.001)  # Wilson, 4 of 6
    assert whole.interval.high == pytest.approx(0.903, abs=0.001)


def test_drift_is_told_when_chance_is_no_explanation() -> None:
    before = outcomes(*["true"] * 80, *["false"] * 20)
    same, worse = outcomes(*["true"] * 15, *["false"] * 6), outcomes(*["true"] * 9, *["false"] * 12)
    assert drifted(same, before).passed
    found = drifted(worse, before)
    assert not found.passed
    assert "of 21 bottleneck hints of the newest week 43% came true, 80% of 100 in the four weeks before" in found.words
    few = drifted(outcomes(*["false"] * (MIN_HINTS - 1), *["censored"] * 50), before)
    assert (few.passed, few.is_judged) == (True, False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as opened:
        yield opened


def snapshot(second: float, version: int, *hints: Bottleneck) -> Snapshot:
    items = [msgspec.Raw(msgspec.json.encode(hint)) for hint in hints]
    return Snapshot(1, "bottlenecks", "alpha", version, at(second), 30, 1, 45, {"bottleneck": "m1"}, "", 0.0, items)


def test_a_night_keeps_what_became_of_yesterdays_hints(tmp_path: Path, store: Store) -> None:
    one, two = bottleneck("b1", nodes=["n1"]), bottleneck("b2", node="n2", is_held_out=True)
    fact, gone = bottleneck("b3", node="n3", is_active=True), bottleneck("b4", node="n4")
    rows = hint_rows("alpha", [
        snapshot(0, 1, one, two, fact, gone),
        snapshot(60, 2, msgspec.structs.replace(one, horizon_s=30), two),
        snapshot(90, 3, msgspec.structs.replace(one, is_active=True)),
        snapshot(-86_400, 4, bottleneck("old")),
    ])  # fmt: skip
    said_by = pl.DataFrame(
        [("alpha", "gpu", "GPU-b1", "n1", "GPU-b1", HEAT, at(80), at(300), False)],
        schema={name: schema("feat_labels")[name] for name in ("cluster", "scope", "scope_id", "node", "gpu_uuid",
                "bottleneck_class", "onset_time", "clear_time", "is_censored")}, orient="row",
    )  # fmt: skip
    minutes = pl.DataFrame([
        {"ts": at(60 * m), "cluster": "alpha", "node": node, "gpu_uuid": f"GPU-{node}", "gpu_index": 0}
        for node in ("n1", "n2", "n4") for m in range(-1, 6) if (node, m) != ("n4", 1)
    ]).with_columns(pl.col("ts").cast(schema("core_gpu_minutes")["ts"]))  # fmt: skip
    for table, frame in (("out_hints", rows), ("feat_labels", said_by), ("core_gpu_minutes", minutes)):
        store.transact(lambda w, t=table, f=frame: w.upsert(t, f))
    with store.reader() as reader:
        (first, *_) = read_hints(reader, "alpha", UNTIL - timedelta(days=1), UNTIL)
    assert (first.visible_at, first.claimed_until) == (at(0), at(90))
    report = score_outcomes(store, "alpha", UNTIL + timedelta(hours=3), draws=1000)
    kept = store.query(f"SELECT hint_id, verdict, reason, lead_s, is_held_out FROM {TABLE} ORDER BY hint_id").rows()
    assert kept == [
        ("b1", "true", None, 80.0, False),
        ("b2", "false", "no onset", None, True),
        ("b4", "censored", "telemetry had a gap", None, False),
    ]
    assert report.hints == [
        "thermal_throttle: 50% of 2 hints came true, 100% of 1 onsets had been foreseen, 80 s ahead (median)"
    ]
    assert report.figures["hints_precision"] == 0.5
    assert [v.fate for v in report.verdicts if v.name == "hints_precise"] == ["could not judge"]
    scores = store.query("SELECT metric, value FROM out_scores WHERE task = 'published_bottleneck'")
    assert dict(scores.iter_rows())["recall"] == 1.0
    score_outcomes(store, "alpha", UNTIL + timedelta(hours=9), draws=1000)
    assert store.query(f"SELECT count(*) AS n FROM {TABLE}")["n"][0] == 3
    publish_outcomes(tmp_path, report)
    assert decode_word(outcomes_path(tmp_path, "alpha").read_bytes()).figures["hints_lead_median_s"] == 80.0


def test_nothing_published_is_nothing_judged(store: Store) -> None:
    found = score_hints(store, "alpha", UNTIL)
    assert found.rows.is_empty()
    assert (found.scores, found.words) == ([], [])
    assert found.verdict is not None
    assert not found.verdict.is_judged
