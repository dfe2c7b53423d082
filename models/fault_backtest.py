"""Backtest of node faults on any fault record: walked forward over the newest 30 % of time, fitted anew each week.

Here belong the walk, who is judged beside whom and what the record allows at best; the forecaster stands in
`models/node_failure.py`, the record in `models/fault_history.py`, figures in `models/event_scores.py`. Nodes in fault
are not at risk; a fit knows what had begun and ended by then.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
from numpy.typing import NDArray

from models.backtest_report import Score
from models.event_report import EventReport, moment, report_of_events
from models.event_scores import MODEL, Judged, horizon_name
from models.fault_history import DAY_S, HOUR_S, FaultHistory
from models.node_failure import BASELINES, HORIZONS_S, NodeFailureForecaster, NodeModelError, baseline
from models.onset_backtest import Step, unheard
from models.promotion import Interval

Floats = NDArray[np.float64]

TRAIN_SHARE = 0.7
# Moments at which every node is asked: a week ahead changes little in six hours, an hour ahead all.
GRID_S = (HOUR_S, 6 * HOUR_S, 6 * HOUR_S)
TOP_SHARE = 0.05  # of the nodes: whose next week's faults are counted
STARTS, ENDS = ("fault_start", "start"), ("fault_end", "end", "recovery")


class FaultBacktestError(ValueError):
    """A fault record cannot be backtested; the message says what is missing."""


def faults_of(record: pl.DataFrame) -> pl.DataFrame:
    """Faults with start and end, from rows of `core_faults` or from a log of events. Rows that come twice count once.

    Args:
        record: Either `node`, `start_time` and, where known, `end_time`, `kind`; or events: `node_id` (or `node`),
            `event_time`, `event_type` (`fault_start`, `fault_end`) and, where known, `class`.

    Returns:
        `node`, `start_time`, `end_time`, `kind`, by node and start.

    Raises:
        FaultBacktestError: Neither set of columns is there, or an event type is unknown.
    """
    columns = set(record.columns)
    if {"node", "start_time"} <= columns:
        given = [name for name in ("node", "start_time", "end_time", "kind") if name in columns]
        frame = record.select(given).with_columns(pl.col("node").cast(pl.String))
        for name, dtype in (("end_time", pl.Datetime("us", "UTC")), ("kind", pl.String)):
            if name not in columns:
                frame = frame.with_columns(pl.lit(None, dtype=dtype).alias(name))
        return frame.drop_nulls(["node", "start_time"]).unique().sort("node", "start_time", "end_time", "kind")
    named = next((name for name in ("node_id", "node") if name in columns), None)
    if named is None or not {"event_time", "event_type"} <= columns:
        raise FaultBacktestError(
            f"faults need node and start_time, or node_id, event_time and event_type; they have "
            f"{', '.join(record.columns)}"
        )
    told = [name for name in (named, "event_time", "event_type", "class") if name in columns]
    rows = record.select(told).drop_nulls([named, "event_time"]).unique(maintain_order=True)
    rows = rows.sort(named, "event_time", maintain_order=True)
    unknown = sorted(set(rows["event_type"].drop_nulls().unique().to_list()) - {*STARTS, *ENDS})
    if unknown:
        raise FaultBacktestError(f"event_type {unknown[0]!r} is unknown; known: {', '.join((*STARTS, *ENDS))}")
    following = rows.with_columns(
        pl.col("event_time").shift(-1).over(named).alias("_next_time"),
        pl.col("event_type").shift(-1).over(named).alias("_next_type"),
    )
    kind = pl.col("class") if "class" in columns else pl.lit(None, dtype=pl.String)
    return following.filter(pl.col("event_type").is_in(STARTS)).select(
        pl.col(named).cast(pl.String).alias("node"),
        pl.col("event_time").alias("start_time"),
        pl.when(pl.col("_next_type").is_in(ENDS)).then("_next_time").alias("end_time"),
        kind.cast(pl.String).alias("kind"),
    )


def backtest_faults(
    record: pl.DataFrame,
    *,
    nodes: int | None = None,
    refit_days: float = 7.0,
    seed: int = 1,
    test_share: float = 1 - TRAIN_SHARE,
    step: Step = unheard,
    progress: Callable[[int, int], None] | None = None,
) -> EventReport:
    """Backtest P(fault within 1 hour, 1 day, 7 days) of each node.

    Args:
        record: As of `faults_of`.
        nodes: Nodes there are, with those that never faulted; None: those with a fault.
        refit_days: Days between fits.
        seed: Seed of every random choice.
        test_share: Newest share of time that is judged.
        step: Told what is begun.
        progress: Called with fits done and in all.

    Raises:
        FaultBacktestError: The record cannot be used, is too short, or names more nodes than there are said to be.
    """
    step("faults and their ends")
    faults = faults_of(record)
    named = sorted(faults["node"].unique().to_list())
    if not named:
        raise FaultBacktestError("the record holds no fault")
    if nodes is not None and nodes < len(named):
        raise FaultBacktestError(f"--nodes {nodes}: the record names {len(named)} nodes with a fault")
    quiet = [f"unnamed-{i}" for i in range((nodes or len(named)) - len(named))]
    history = FaultHistory(faults, named + quiet)
    ended = history.end[np.isfinite(history.end)]
    end = max(float(history.start.max()), float(ended.max(initial=0.0)))
    cut = end - test_share * (end - history.since)
    longest = max(HORIZONS_S.values())
    if end - cut <= longest:
        raise FaultBacktestError(
            f"the newest {test_share:.0%} of the record are {(end - cut) / DAY_S:.1f} days: more than "
            f"{longest / DAY_S:.0f} are needed to judge a week ahead"
        )
    step("walking forward")
    parts = []
    firsts = np.arange(cut, end - HOUR_S, refit_days * DAY_S)
    for i, first in enumerate(firsts):
        try:
            model = NodeFailureForecaster.fit(history, first, seed=seed)
        except NodeModelError as error:
            raise FaultBacktestError(f"no fit at {moment(first):%Y-%m-%d}: {error}") from None
        parts.append(_week(history, model, first, min(first + refit_days * DAY_S, end - HOUR_S), cut, end))
        if progress is not None:
            progress(i + 1, len(firsts))
    judged = _joined(parts, history, cut)
    step("scoring")
    report = report_of_events(
        judged, kind="faults", subject="node faults", unit="node", span_s=(cut, end), train_end_s=None,
        notes=[], predictions=_rows(judged, history, cut), seed=seed,
    )  # fmt: skip
    top, notes = _top_scores(judged, history, end)
    report.scores.extend(top)
    report.notes.extend(notes)
    report.notes.append(
        f"{len(firsts)} fits, each on the faults known by then. {len(history.nodes)} nodes, of which {len(quiet)} have "
        "no name in the record and no fault."
    )
    if nodes is None:
        report.notes.append("Nodes that never faulted are not in this record: --nodes N says how many there are.")
    return report


def _week(
    history: FaultHistory, model: NodeFailureForecaster, first: float, last: float, cut: float, end: float
) -> Judged:
    """Every node at every moment of the finest grid until the next fit."""
    moments = cut + np.arange(np.ceil((first - cut) / GRID_S[0]), np.ceil((last - cut) / GRID_S[0])) * GRID_S[0]
    node, at = np.tile(np.arange(len(history.nodes)), len(moments)), np.repeat(moments, len(history.nodes))
    up = ~history.is_down(node, at)
    node, at = node[up], at[up]
    horizons = np.array(list(HORIZONS_S.values()))
    came = history.next_start_s(node, at)[:, None] <= horizons
    # Coarser grids for longer horizons: what lies between says the same again.
    asked = _on_grid(at, cut)
    known = asked & (at[:, None] + horizons <= end)
    given = {MODEL: model.forecast(history, node, at)}
    given |= {name: baseline(name, history, node, at) for name in BASELINES}
    return Judged(tuple(horizons), node, at, came, known, np.zeros(0, np.int64), np.zeros(0), given)


def _on_grid(at_s: Floats, cut: float) -> NDArray[np.bool_]:
    """Which moments are on the grid of each horizon, shape (rows, horizons)."""
    return np.round((at_s - cut)[:, None]) % np.array(GRID_S) == 0


def _joined(parts: list[Judged], history: FaultHistory, cut: float) -> Judged:
    onset = history.start >= cut
    return Judged(
        parts[0].horizons_s,
        np.concatenate([part.unit for part in parts]), np.concatenate([part.at_s for part in parts]),
        np.concatenate([part.came for part in parts]), np.concatenate([part.known for part in parts]),
        history.node[onset], history.start[onset],
        {name: np.concatenate([part.given[name] for part in parts]) for name in parts[0].given},
    )  # fmt: skip


def _rows(judged: Judged, history: FaultHistory, cut: float) -> pl.DataFrame:
    """Forecasts as rows: `node`, `ts`, `horizon` (`1h`, `1d`, `7d`), `p_fault`."""
    names = np.array(history.nodes, dtype=object)
    parts = []
    for k, horizon_s in enumerate(judged.horizons_s):
        grid = _on_grid(judged.at_s, cut)[:, k]
        micros = np.round(judged.at_s[grid] * 1e6).astype(np.int64)
        parts.append(
            pl.DataFrame(
                {
                    "node": pl.Series(names[judged.unit[grid]].tolist(), dtype=pl.String),
                    "ts": pl.Series(micros).cast(pl.Datetime("us", "UTC")),
                    "horizon": pl.Series([horizon_name(horizon_s)] * int(grid.sum()), dtype=pl.String),
                    "p_fault": judged.given[MODEL][grid, k],
                }
            )
        )
    return pl.concat(parts).sort("ts", "node", "horizon")


def _top_scores(judged: Judged, history: FaultHistory, end: float) -> tuple[list[Score], list[str]]:
    """Share of a week's faults on the nodes said to be worst at its start, and the most there is to get."""
    week_s = judged.horizons_s[-1]
    count = max(1, round(TOP_SHARE * len(history.nodes)))
    first = judged.at_s.min()
    caught: dict[str, float] = dict.fromkeys([*judged.given, "ceiling"], 0.0)
    faults = 0
    for start in np.arange(first, end - week_s + 1, week_s):
        rows = np.flatnonzero(judged.at_s == _nearest(judged.at_s, start))
        node = judged.unit[rows]
        at = judged.at_s[rows]
        ahead = history.before(node, at + week_s) - history.before(node, at)
        faults += int(((history.start > at[0]) & (history.start <= at[0] + week_s)).sum())
        for name, p in judged.given.items():
            caught[name] += _expected_of_top(p[rows, -1], ahead, count)
        # Hindsight among nodes that have faulted before: nothing in a fault record tells the others apart.
        known = np.where(history.count(node, at) > 0, ahead, 0)
        caught["ceiling"] += int(np.sort(known)[::-1][:count].sum())
    if not faults:
        return [], []
    name = f"top_{TOP_SHARE * 100:.0f}pct_share_of_faults_{horizon_name(week_s)}"
    scores = [Score(name, who, Interval(n / faults, None, None, 0), faults) for who, n in caught.items()]
    note = (
        f"The {count} nodes said to be worst at the start of each week had {caught[MODEL] / faults:.1%} of {faults} "
        f"faults of those weeks (repeat offenders {caught['repeat_offender'] / faults:.1%}). In hindsight the {count} "
        f"best among nodes that had faulted before would have had {caught['ceiling'] / faults:.1%}: more is not in a "
        "fault record."
    )
    return scores, [note]


def _expected_of_top(p: Floats, ahead: NDArray[np.int64], count: int) -> float:
    """Faults of the nodes with the highest forecasts; nodes that are tied at the edge share its places evenly."""
    edge = np.sort(p)[::-1][min(count, len(p)) - 1]
    above, tied = p > edge, p == edge
    return float(ahead[above].sum() + ahead[tied].sum() * (count - above.sum()) / max(tied.sum(), 1))


def _nearest(at_s: Floats, moment_s: float) -> float:
    return float(at_s[np.argmin(np.abs(at_s - moment_s))])
