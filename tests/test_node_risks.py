"""Which node and which GPU, and why: risks of GPUs, lemons, spares."""

from datetime import timedelta

import numpy as np
import polars as pl
import pytest

from models.fault_history import DAY_S, FaultHistory
from models.lemons import LEMON_SCORE, lemons
from models.node_failure import NodeFailureForecaster
from models.node_risks import forecast_nodes
from models.risk_outcomes import judge_risks, risk_words
from tests.test_node_failure import S0, day, faults, nodes_frame

SIGN = {"sign": "ecc", "amount": 1.0, "xid": None}


def signs(*rows) -> pl.DataFrame:
    """From (node, GPU, day[, sign, amount, xid])."""
    return pl.DataFrame(
        [
            {"node": node, "gpu_uuid": gpu, "ts": day(at), **dict(zip(SIGN, more or SIGN.values(), strict=True))}
            for node, gpu, at, *more in rows
        ],
        schema_overrides={"amount": pl.Float64, "xid": pl.Int32},
    )  # fmt: skip


def warned_fleet(nodes=80, days=150, seed=2):
    """A fleet in which every third fault is of a GPU that had an ECC error hours before; errors else lead nowhere."""
    rng = np.random.default_rng(seed)
    rows, told = [], []
    for i in range(nodes):
        t = 0.0
        while True:
            t += rng.exponential(60)
            if t > days:
                break
            gpu = f"n{i}-{rng.integers(8)}"
            if rng.random() < 0.5:
                told.append((f"n{i}", gpu, t - rng.uniform(0.05, 0.5)))
            rows.append((f"n{i}", t, t + 0.5, gpu))
            t += 0.5
        told += [(f"n{i}", f"n{i}-{rng.integers(8)}", at) for at in rng.uniform(0, days, rng.poisson(0.5))]
    record = faults([(node, a, b) for node, a, b, _ in rows]).with_columns(pl.Series("gpu_uuid", [r[3] for r in rows]))
    boards = {f"n{i}": [f"n{i}-{k}" for k in range(8)] for i in range(nodes)}
    return record, signs(*told), boards


@pytest.fixture(scope="module")
def warned():
    record, told, boards = warned_fleet()
    history = FaultHistory(record, list(boards), S0, signs=told, gpus=boards)
    return history, NodeFailureForecaster.fit(history, S0 + 110 * DAY_S)


def test_a_gpu_with_signs_is_likelier_and_the_parts_make_the_whole(warned):
    history, model = warned
    at_s = S0 + 120 * DAY_S
    gpus, nodes = np.arange(len(history.gpus)), np.arange(len(history.nodes))
    of_gpus = model.forecast_gpus(history, gpus, np.full(len(gpus), at_s))
    of_nodes = model.forecast(history, nodes, np.full(len(nodes), at_s))
    assert (np.diff(of_gpus, axis=1) >= 0).all()
    sums = np.stack([np.bincount(history.gpu_node, weights=p, minlength=len(nodes)) for p in of_gpus.T], axis=1)
    # GPUs have their share of the node's faults as long as these are few; the rest is of the node.
    np.testing.assert_allclose((sums / of_nodes)[:, :2], model.hazard.gpu_share, rtol=0.1)
    assert model.hazard.gpu_share > 0.9
    assert model.hazard.same_share > 0.5
    ecc = history.gpu_signs["ecc"].level(gpus, np.full(len(gpus), at_s))[:, 1]
    assert of_gpus[ecc > 0.3, 1].min() > 2 * np.median(of_gpus[:, 1])


def test_the_gpu_that_fails_is_told_by_its_signs(warned):
    history, model = warned
    late = (history.start > S0 + 110 * DAY_S) & (history.gpu >= 0)
    ranks = []
    for node, gpu, start in zip(history.node[late], history.gpu[late], history.start[late], strict=True):
        own = np.flatnonzero(history.gpu_node == node)
        p = model.forecast_gpus(history, own, np.full(len(own), start - 600.0))[:, 1]
        ranks.append(p[own == gpu][0] == p.max() and p.max() > 1.5 * np.median(p))
    assert len(ranks) > 30
    assert 0.3 < np.mean(ranks) < 0.8  # half of the faults are without a sign


def test_later_signs_change_nothing():
    record, told, boards = warned_fleet()
    now = day(100)
    nodes = nodes_frame(sorted(boards))
    whole = forecast_nodes(None, nodes, record, told, now)
    past = forecast_nodes(None, nodes, record, told.filter(pl.col("ts") <= now), now)
    assert whole.nodes.equals(past.nodes)
    assert whole.gpus.equals(past.gpus)


def test_a_lemon_is_told_in_words():
    record = faults([("a", 80, 82), ("a", 90, 93), ("a", 96, 98), ("b", 40, 41), ("c", 97, 98)]).with_columns(
        pl.Series("gpu_uuid", ["g1", "g1", "g2", "", ""])
    )
    told = signs(("a", "g1", 95), ("a", "g1", 95.5), ("a", "g1", 99, "xid", 2.0, 63), ("b", "h", 50), ("c", "k", 99))
    states = pl.DataFrame({"node": ["a"], "gpu_uuid": ["g1"], "is_remap_pending": [True], "is_remap_failed": [False]})
    nodes = nodes_frame(list("abcd")).with_columns(state=pl.Series(["IDLE", "IDLE", "IDLE", "IDLE+DRAIN"]))
    risks = forecast_nodes(None, nodes, record, told, day(100), states=states)
    by = {row["node"]: row for row in risks.nodes.iter_rows(named=True)}
    assert by["a"]["reasons"] == (
        "back in service for 2 days after a fault (node_down); 3 faults on record; 3 faults in 28 d, fleet median 0.5; "
        "2 of them on GPU g1; out of service 168 h of 28 d; remap pending; 2 uncorrectable ECC errors in 28 d; "
        "2 × XID 63 in 28 d (nothing at once)"
    )
    assert by["a"]["lemon_score"] >= LEMON_SCORE > by["c"]["lemon_score"] > by["b"]["lemon_score"] == 0
    assert by["b"]["reasons"] == "back in service for 59 days after a fault (node_down)"
    assert by["d"]["reasons"] == ""
    # The quiet node is the best spare, the lemon the last one, and a drained node is none.
    assert {name: row["spare_rank"] for name, row in by.items()} == {"a": 3, "b": 1, "c": 2, "d": None}
    assert dict(risks.gpus.select("gpu_uuid", "reasons").iter_rows()) == {
        "g1": "2 faults in 28 d; remap pending; 2 uncorrectable ECC errors in 28 d; "
        "2 × XID 63 in 28 d (nothing at once)",
        "g2": "1 fault in 28 d",
        "k": "1 uncorrectable ECC error in 28 d",
    }
    history = FaultHistory(record, list("abcd"), signs=told)
    assert lemons(history, told, None, (day(100) + timedelta(days=60)).timestamp())[0].words == []


def test_published_risks_are_judged_by_what_came():
    begin, until = day(100), day(107)
    rows = pl.DataFrame(
        [
            {"node": f"n{i:02}", "generated_at": day(93 + d), "p_1h": 0.0001, "p_24h": 0.02,
             "p_7d": 0.5 if i < 2 else 0.01, "model_version": "v1"}
            for i in range(40) for d in range(14)
        ]
    )  # fmt: skip
    record = faults([("n00", 97.5, 98), ("n01", 103.5, None), ("n39", 50, 51), ("n05", 107.5, None)])
    outcome = judge_risks(rows, record, begin, until, draws=100)
    # A week from days 94 to 100: n00 on four of them, n01 on four.
    assert outcome.find("happened_7d").value == pytest.approx(8 / 280)
    assert outcome.find("said_7d").value == pytest.approx((0.5 * 14 + 0.01 * 38 * 7) / 280)
    # A day from days 100 to 106: n01 is in fault on three of them.
    assert outcome.find("happened_24h").value == pytest.approx(1 / 277)
    assert outcome.find("log_loss_ratio_7d", "climatology").value < 0.8
    assert [line.split(":")[0] for line in risk_words(outcome)] == [
        "node faults within 1 h", "node faults within 24 h", "node faults within 7 d",
    ]  # fmt: skip
    assert not judge_risks(rows.clear(), record, begin, until).is_judged
    assert risk_words(judge_risks(rows.head(3), record, begin, until)) == []


def test_without_a_model_the_rule_speaks_that_past_weeks_speak_for():
    """A lemon among quiet nodes is told by its own rate, like nodes and short records by the fleet's."""
    rng = np.random.default_rng(5)
    lemon = [("n0", t, t + 0.2) for t in np.arange(1.0, 100.0, 2.5)]
    others = [(f"n{i}", t, t + 0.2) for i in range(1, 40) for t in rng.uniform(0, 100, rng.poisson(0.5))]
    like = [(f"n{rng.integers(40)}", t, t + 0.2) for t in rng.uniform(0, 100, 60)]
    names = [f"n{i}" for i in range(40)]
    told = forecast_nodes(None, nodes_frame(names), faults(lemon + others), None, day(100)).nodes
    assert set(told["model_version"]) == {"baseline:own_rate"}
    by = dict(told.select("node", "p_24h").iter_rows())
    assert by["n0"] > 10 * np.median(list(by.values()))
    assert (told["p_1h"] < told["p_24h"]).all()
    same = forecast_nodes(None, nodes_frame(names), faults(like), None, day(100)).nodes
    assert set(same["model_version"]) == {"baseline:climatology"}
    few = forecast_nodes(None, nodes_frame(names), faults(lemon[:4]), None, day(12)).nodes
    assert set(few["model_version"]) == {"baseline:climatology"}
    # What comes later changes nothing.
    later = forecast_nodes(None, nodes_frame(names), faults([*lemon, *others, ("n5", 101, 102)]), None, day(100)).nodes
    assert later.equals(told)
