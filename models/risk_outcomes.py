"""Published node risks beside the faults that came, and beside the fleet's rate as it was known then.

Here belong the join and the figures; no reading, no keeping. What becomes of the model's own test stands in
`models/training_hardware.py`.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import numpy as np
import polars as pl

from models.backtest_report import Score
from models.fault_history import FaultHistory
from models.node_failure import HORIZONS_S, baseline
from models.outcome_scores import KindOutcome
from models.promotion import DRAWS, mean_interval, ratio_interval

CLIMATOLOGY = "climatology"
MIN_LOOKS = 30


def judge_risks(
    rows: pl.DataFrame, faults: pl.DataFrame, begin: datetime, until: datetime, *, draws: int = DRAWS, seed: int = 1
) -> KindOutcome:
    """Score risks whose horizon has passed.

    Args:
        rows: Rows of `out_node_risks` of one cluster, one a node and day at most.
        faults: Rows of `core_faults`, those of the year before among them.
        begin: Horizons that ended after this moment are judged, UTC.
        until: And at this moment or before; a fault that began later has not come.
        draws: Bootstrap draws; blocks are nodes.
        seed: Seed of the draws.

    Returns:
        By horizon of at least `MIN_LOOKS` publications of nodes that were not in fault: `said_<horizon>`,
        `happened_<horizon>`, `log_loss_<horizon>` beside that of the fleet's rate, and its `log_loss_ratio_<horizon>`.
    """
    outcome = KindOutcome("node_failure")
    if rows.is_empty():
        return outcome
    history = FaultHistory(faults.filter(pl.col("start_time") <= until), rows["node"].unique().to_list())
    if not len(history.start):
        history.since = (begin - timedelta(days=1)).timestamp()
    for i, (name, horizon_s) in enumerate(HORIZONS_S.items()):
        ends = pl.col("generated_at") + timedelta(seconds=horizon_s)
        due = rows.filter((ends > begin) & (ends <= until) & pl.col(name).is_not_null())
        node = np.searchsorted(np.array(history.nodes, dtype=object), due["node"].to_numpy().astype(object))
        at = due["generated_at"].dt.epoch("us").to_numpy() / 1e6
        up = ~history.is_down(node, at)
        node, at, p = node[up], at[up], due[name].to_numpy()[up]
        if len(node) < MIN_LOOKS:
            continue
        came = history.next_start_s(node, at) <= horizon_s
        losses = {"": _loss(p, came), CLIMATOLOGY: _loss(baseline(CLIMATOLOGY, history, node, at)[:, i], came)}
        tail = name[2:]
        figures = {("said", ""): p, ("happened", ""): came.astype(np.float64)}
        figures |= {("log_loss", who): loss for who, loss in losses.items()}
        for (metric, who), values in figures.items():
            interval = mean_interval(values, node, draws=draws, seed=seed)
            outcome.scores.append(Score(f"{metric}_{tail}", who, interval, len(node)))
        ratio = ratio_interval(losses[""], losses[CLIMATOLOGY], node, draws=draws, seed=seed)
        outcome.scores.append(Score(f"log_loss_ratio_{tail}", CLIMATOLOGY, ratio, len(node)))
        outcome.rows += len(node)
        outcome.best_baseline = CLIMATOLOGY
        for version, count in due.group_by("model_version").len().sort("model_version").iter_rows():
            outcome.versions[version] = outcome.versions.get(version, 0) + count
    return outcome


def risk_words(outcome: KindOutcome) -> list[str]:
    """How published risks did, in words: one line a horizon."""
    lines = []
    for name, label in (("1h", "1 h"), ("24h", "24 h"), ("7d", "7 d")):
        said, came = outcome.find(f"said_{name}"), outcome.find(f"happened_{name}")
        ratio = outcome.find(f"log_loss_ratio_{name}", CLIMATOLOGY)
        if said is None or came is None or ratio is None:
            continue
        between = "" if ratio.low is None or ratio.high is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
        count = next(score.count for score in outcome.scores if score.metric == f"said_{name}")
        lines.append(
            f"node faults within {label}: said {said.value:.2%}, came {came.value:.2%} of {count:,} looks; log loss "
            f"{ratio.value:.2f}{between} of the fleet's rate"
        )
    return lines


def _loss(p: np.ndarray, came: np.ndarray) -> np.ndarray:
    q = np.clip(p, 1e-9, 1 - 1e-9)
    return -np.where(came, np.log(q), np.log1p(-q))
