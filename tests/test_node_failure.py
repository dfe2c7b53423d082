"""Node failure: the record at a moment, the recurrent hazard, its baselines, training, and risks in words."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.hardware_signs import sign_events
from features.vocabulary import schema
from models.fault_history import DAY_S, HOUR_S, PRIOR_RATE, FaultHistory
from models.node_failure import BASELINES, HORIZONS_S, NodeFailureForecaster, NodeModelError, baseline
from models.node_risks import forecast_nodes
from models.registry import Registry
from models.training_hardware import node_losses, train_node_failure

START = datetime(2026, 1, 1, tzinfo=UTC)
S0 = START.timestamp()


def day(value):
    return START + timedelta(days=float(value))


def faults(rows):
    """From (node, start day, end day or None[, kind])."""
    return pl.DataFrame(
        [
            {"cluster": "c", "node": row[0], "gpu_uuid": "", "kind": row[3] if len(row) > 3 else "node_down",
             "xid": None, "start_time": day(row[1]), "end_time": None if row[2] is None else day(row[2])}
            for row in rows
        ],
        schema=schema("core_faults"),
    )  # fmt: skip


def fleet(nodes=100, days=120, seed=1):
    """A fleet in which a fault calls the next one within days, and a tenth of the nodes have four times the rate."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(nodes):
        base = 0.006 * (4 if i % 10 == 0 else 1)
        t = 0.0
        while True:
            t += rng.exponential(1 / base) if rng.random() < 0.6 or not rows else rng.exponential(1.5)
            if t > days:
                break
            repaired = t + rng.exponential(0.5)
            rows.append((f"n{i}", t, repaired))
            t = repaired
    return faults(rows), [f"n{i}" for i in range(nodes)]


def test_a_record_shows_only_what_has_happened_by_then():
    history = FaultHistory(
        faults([("a", 10, 12), ("a", 20, 21), ("a", 20.5, 23), ("b", 15, None)]), ["a", "b", "c"], S0
    )
    a, b, c = (np.array([history.nodes.index(name)]) for name in "abc")

    def at(value):
        return np.array([S0 + value * DAY_S])

    assert history.count(a, at(9))[0] == 0
    assert history.count(a, at(10))[0] == 1
    assert history.count(a, at(30))[0] == 2  # the third lies within the second
    assert history.count(a, at(30), 12 * DAY_S)[0] == 1
    assert [bool(history.is_down(a, at(v))[0]) for v in (9, 11, 12, 22, 23)] == [False, True, False, True, False]
    assert [bool(history.is_down(b, at(v))[0]) for v in (14, 16, 100)] == [False, True, True]
    assert history.exposure_s(a, at(11))[0] == pytest.approx(10 * DAY_S)
    assert history.exposure_s(a, at(30))[0] == pytest.approx(25 * DAY_S)
    assert history.exposure_s(b, at(40))[0] == pytest.approx(15 * DAY_S)
    assert history.exposure_s(c, at(40))[0] == pytest.approx(40 * DAY_S)
    assert history.next_start_s(a, at(8))[0] == pytest.approx(2 * DAY_S)
    assert np.isinf(history.next_start_s(c, at(8))[0])
    # An end that has not come yet is not known: the excitation of a fault counts from the return to service.
    before, during, after = (history.returns.level(a, at(v))[0] for v in (19, 22, 24))
    assert (during < before).all()
    assert (after > before).all()
    np.testing.assert_allclose(after[3], np.exp(-12 / 14) + np.exp(-1 / 14))
    service = zip(*history.in_service(S0 + 5 * DAY_S, S0 + 30 * DAY_S), strict=True)
    spans = [(history.nodes[n], round((x - S0) / DAY_S), round((y - S0) / DAY_S)) for n, x, y in service]
    assert sorted(spans) == [("a", 5, 10), ("a", 12, 20), ("a", 23, 30), ("b", 5, 15), ("c", 5, 30)]


def test_features_do_not_see_later_faults():
    record, names = fleet()
    cut = S0 + 60 * DAY_S
    whole = FaultHistory(record, names, S0)
    past = FaultHistory(record.filter(pl.col("start_time") <= day(60)), names, S0)
    node = np.arange(len(names))
    moments = np.full(len(names), cut)
    np.testing.assert_allclose(whole.returns.level(node, moments), past.returns.level(node, moments))
    everyone = np.zeros(len(node), dtype=np.int64)
    np.testing.assert_allclose(whole.fleet.level(everyone, moments), past.fleet.level(everyone, moments))
    for name in BASELINES:
        np.testing.assert_allclose(baseline(name, whole, node, moments), baseline(name, past, node, moments))
    assert whole.shape(cut) == pytest.approx(past.shape(cut))
    one, other = NodeFailureForecaster.fit(whole, cut), NodeFailureForecaster.fit(past, cut)
    assert (one.weights, one.say) == (other.weights, other.say)
    np.testing.assert_array_equal(one.forecast(whole, node, moments), other.forecast(past, node, moments))


def walk_forward(history, begin_day, end_day, refit_days=14):
    """Log loss by horizon of the model and each baseline, and outcomes with the model's P(24 h)."""
    losses = {name: [] for name in ("", *BASELINES)}
    pairs = []
    for first in np.arange(begin_day, end_day, refit_days):
        model = NodeFailureForecaster.fit(history, S0 + first * DAY_S)
        moments = S0 + np.arange(first, min(first + refit_days, end_day), 0.25) * DAY_S
        node, at = np.tile(np.arange(len(history.nodes)), len(moments)), np.repeat(moments, len(history.nodes))
        up = ~history.is_down(node, at)
        node, at = node[up], at[up]
        given = {"": model.forecast(history, node, at)} | {n: baseline(n, history, node, at) for n in BASELINES}
        for name, p in given.items():
            losses[name].append(node_losses(history, node, at, p, S0 + (end_day + 8) * DAY_S))
        pairs.append(np.column_stack((given[""][:, 1], history.next_start_s(node, at) <= DAY_S)))
    return {name: np.nanmean(np.concatenate(parts), axis=0) for name, parts in losses.items()}, np.concatenate(pairs)


def test_the_recurrent_hazard_beats_climatology_and_is_calibrated():
    record, names = fleet(nodes=150, days=160)
    history = FaultHistory(record, names, S0)
    losses, pairs = walk_forward(history, 80, 150)
    for name in BASELINES:
        assert (losses[""] < losses[name]).all(), name
    p, came = pairs.T
    top = p >= np.quantile(p, 0.95)
    assert came[top].mean() > 2 * came.mean()
    assert p.mean() == pytest.approx(came.mean(), rel=0.25)
    assert p[top].mean() == pytest.approx(came[top].mean(), rel=0.35)


def test_probabilities_never_fall_with_the_horizon():
    record, names = fleet()
    history = FaultHistory(record, names, S0)
    model = NodeFailureForecaster.fit(history, S0 + 100 * DAY_S)
    node = np.arange(len(names))
    p = model.forecast(history, node, np.full(len(names), S0 + 100 * DAY_S))
    assert list(HORIZONS_S) == ["p_1h", "p_24h", "p_7d"]
    assert (np.diff(p, axis=1) >= 0).all()
    assert ((p > 0) & (p < 1)).all()
    for name in BASELINES:
        q = baseline(name, history, node, np.full(len(names), S0 + 100 * DAY_S))
        assert (np.diff(q, axis=1) > 0).all()
    with pytest.raises(ValueError, match="climatology"):
        baseline("none", history, node, np.full(len(names), S0))
    again = NodeFailureForecaster.from_files(model.to_files(), "v")
    np.testing.assert_array_equal(again.forecast(history, node, np.full(len(names), S0 + 1e7)),
                                  model.forecast(history, node, np.full(len(names), S0 + 1e7)))  # fmt: skip
    with pytest.raises(NodeModelError, match="missing"):
        NodeFailureForecaster.from_files({})
    with pytest.raises(NodeModelError, match="needed before a model"):
        NodeFailureForecaster.fit(history, S0 + 1 * DAY_S)


def test_without_any_fault_climatology_is_the_published_rate():
    history = FaultHistory(faults([]), ["a"], S0)
    p = baseline("climatology", history, np.array([0]), np.array([S0]))[0]
    np.testing.assert_allclose(p, -np.expm1(-PRIOR_RATE * np.array([HOUR_S, DAY_S, 7 * DAY_S])))


@pytest.mark.traces
def test_on_400_servers_of_a_pretraining_cluster(traces):
    """Walk-forward over the second half of 209 days of 400 servers; those that never faulted are not in the file."""
    rows = pl.read_parquet(traces / "faults" / "infinitehbd-2024.parquet").sort("node_id", "event_time")
    following = rows.with_columns(
        pl.col("event_time").shift(-1).over("node_id").alias("end"),
        pl.col("event_type").shift(-1).over("node_id").alias("kind"),
    )
    starts = following.filter(pl.col("event_type") == "fault_start").select(
        pl.col("node_id").alias("node"),
        pl.col("event_time").alias("start_time"),
        pl.when(pl.col("kind") == "fault_end").then("end").alias("end_time"),
    )
    named = starts["node"].unique().to_list()
    history = FaultHistory(starts, named + [f"quiet-{i}" for i in range(400 - len(named))])
    offset = (history.since - S0) / DAY_S
    losses, pairs = walk_forward(history, offset + 104, offset + 195)
    assert losses[""][1] < losses["climatology"][1] * 1.01
    assert losses[""][0] < losses["climatology"][0]
    p, came = pairs.T
    top = p >= np.quantile(p, 0.99)
    assert came[top].mean() > 4 * came.mean()
    assert p.mean() == pytest.approx(came.mean(), rel=0.35)


# --- training and risks -----------------------------------------------------------------------------------


def nodes_frame(names):
    return pl.DataFrame({"node": names, "observed_at": [day(0)] * len(names)})


def test_training_promotes_what_beats_the_baselines_and_keeps_what_it_learned_from(tmp_path):
    record, names = fleet(nodes=200, days=200, seed=3)
    registry = Registry(tmp_path)
    report = train_node_failure(record, nodes_frame(names), registry, day(190), cluster="c")
    assert report.promoted, report.reason
    assert registry.champion("node_failure") == report.version
    assert set(report.scores["baseline"]) == {"", *BASELINES}
    early = record.filter(pl.col("start_time") <= day(190)).with_columns(
        pl.when(pl.col("end_time") <= day(190)).then("end_time").alias("end_time")
    )
    same = train_node_failure(early, nodes_frame(names), Registry(tmp_path / "b"), day(190), cluster="c")
    loaded = registry.load("node_failure", with_tables=True)
    assert Registry(tmp_path / "b").load("node_failure", same.version, with_tables=True).files == loaded.files
    refit = train_node_failure(record, nodes_frame(names), registry, day(191), cluster="c")
    assert refit.promoted, refit.reason
    assert "refit" in refit.reason


def test_too_few_faults_leave_climatology(tmp_path):
    report = train_node_failure(faults([("a", 1, 2)]), nodes_frame(["a", "b"]), Registry(tmp_path), day(10))
    assert (report.version, report.promoted) == (None, False)
    assert "climatology stays" in report.reason
    rows = forecast_nodes(Registry(tmp_path), nodes_frame(["b", "a"]), faults([("a", 1, 2)]), None, day(10)).nodes
    assert rows["node"].to_list() == ["a", "b"]
    assert set(rows["model_version"]) == {"baseline:climatology"}
    assert rows["p_24h"].n_unique() == 1  # climatology does not tell nodes apart
    assert (rows["p_1h"] < rows["p_24h"]).all()
    assert forecast_nodes(None, nodes_frame([]), faults([]), None, day(10)).nodes.height == 0


def test_risks_say_why(tmp_path):
    record, names = fleet(nodes=200, days=200, seed=3)
    record = pl.concat([record, faults([("n7", 195, 199.5, "nvlink"), ("n8", 199, None, "node_down")])])
    registry = Registry(tmp_path)
    train_node_failure(record, nodes_frame(names), registry, day(190))
    hours = [day(199) + timedelta(hours=h) for h in range(4)]
    signs = pl.DataFrame(
        {
            "ts": hours, "node": ["n9"] * 4, "gpu_uuid": ["g"] * 4, "xid_last": [0, 0, 63, 63],
            "remapped_rows_total": [5.0, 5.0, 7.0, 7.0], "ecc_uncorrected_total": [3.0, 0.0, 0.0, 1.0],
            "nvlink_error_total": [0.0, 1.0, 2.0, 3.0], "is_thermal_slowdown": [True, True, True, False],
        }
    )  # fmt: skip
    signs = sign_events(signs, span=timedelta(hours=1))
    risks = forecast_nodes(registry, nodes_frame(names), record, signs, day(200))
    rows = risks.nodes
    by = {row["node"]: row for row in rows.iter_rows(named=True)}
    assert rows.height == 200
    assert set(rows["model_version"]) == {registry.champion("node_failure")}
    assert by["n7"]["p_24h"] > 3 * rows["p_24h"].median()
    assert by["n7"]["reasons"].startswith("back in service for 12 h after a fault (nvlink)")
    assert by["n8"]["reasons"].startswith("in fault since 2026-07-19 00:00 UTC (node_down)")
    assert by["n9"]["reasons"].endswith(
        "1 uncorrectable ECC error in 28 d; 2 remapped memory rows in 28 d; 3 hours with thermal slowdown in 28 d; "
        "1 × XID 63 in 28 d (nothing at once)"
    )
    later = forecast_nodes(
        registry, nodes_frame(names), pl.concat([record, faults([("n1", 201, None)])]), signs, day(200)
    ).nodes
    assert later.equals(rows)


@pytest.mark.parametrize(
    ("values", "drivers", "words"),
    [
        ([0.0, 40.0, 5.0, 8.0], [None] * 4, "48 uncorrectable ECC errors in 28 d"),  # it began anew before the 5
        ([0.0, 2.0, 50.0, 51.0], ["570", "570", "580", "580"], "3 uncorrectable ECC errors in 28 d"),
        ([0.0, 2.0, None, 4294967295.0], ["570", None, "570", "570"], "2 uncorrectable ECC errors in 28 d"),
    ],
)
def test_growth_goes_on_after_a_reset_and_not_over_a_new_driver(values, drivers, words):
    signs = pl.DataFrame(
        {
            "ts": [day(9) + timedelta(hours=h) for h in range(4)], "node": ["a"] * 4, "gpu_uuid": ["g"] * 4,
            "ecc_uncorrected_total": values, "driver_version": drivers,
        },
        schema_overrides={"driver_version": pl.String},
    )  # fmt: skip
    rows = forecast_nodes(
        None, nodes_frame(["a"]), faults([]), sign_events(signs, span=timedelta(hours=1)), day(10)
    ).nodes
    assert rows["reasons"].to_list() == [words]


def test_a_damaged_champion_gives_way(tmp_path):
    record, names = fleet(nodes=200, days=200, seed=3)
    registry = Registry(tmp_path)
    report = train_node_failure(record, nodes_frame(names), registry, day(190))
    (tmp_path / "node_failure" / report.version / "node_failure.json").write_bytes(b"{}")
    rows = forecast_nodes(registry, nodes_frame(names), record, None, day(190)).nodes
    assert set(rows["model_version"]) == {"baseline:own_rate"}
