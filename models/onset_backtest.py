"""Backtests of bottlenecks of queues and ranks: learn on the first 70 % of time, judge on the rest.

Between what teaches and what judges lies a gap of the longest horizon and the window. Here belong the split, who is
judged beside whom, and the rows that are written; forecasters stand in `models/shortage.py` and `models/straggler.py`,
classes of GPUs, nodes and ports in `models/hazard_backtest.py`, figures in `models/event_scores.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.shortage import WINDOW_S as SHORTAGE_WINDOW_S
from features.shortage import QueueHistory
from features.straggler import StepTimes, step_times
from models import event_scores, shortage, straggler
from models.event_report import EventReport, report_of_events
from models.event_scores import MODEL, Judged
from models.score_calibration import probabilities
from models.shortage import ShortageForecaster, ShortageModelError

Floats = NDArray[np.float64]
Step = Callable[[str], None]

TRAIN_SHARE = 0.7


def unheard(what: str) -> None:
    """Nobody is told."""


class OnsetBacktestError(ValueError):
    """A record cannot be backtested; the message says what is missing."""


def backtest_shortage(
    occupancy: pl.DataFrame,
    *,
    horizons_s: Sequence[float] = shortage.HORIZONS_S,
    refit_days: float | None = None,
    seed: int = 1,
    threads: int = 1,
    step: Step = unheard,
) -> EventReport:
    """Backtest `shortage` on recorded occupancy.

    Args:
        occupancy: As of `features.shortage.QueueHistory`.
        horizons_s: Rising, seconds.
        refit_days: Days between fits in the test, each on what was known by then; None: one fit, before it.
        seed: Seed of every random choice.
        threads: Threads of a fit.
        step: Told what is begun.

    Raises:
        OnsetBacktestError: There are too few onsets on either side.
        features.shortage.OccupancyError: The rows cannot be used.
    """
    step("features of queues")
    history = QueueHistory(occupancy)
    short_of_samples = [h for h in horizons_s if h < 2 * history.interval_s]
    if short_of_samples:
        raise OnsetBacktestError(
            f"horizon {short_of_samples[0]:g} s is shorter than two samples of this file "
            f"({history.interval_s:g} s apart): give horizons of at least {2 * history.interval_s:g} s"
        )
    begin, end = float(history.ts.min()), float(history.ts.max())
    cut = begin + TRAIN_SHARE * (end - begin)
    train_end = cut - horizons_s[-1] - SHORTAGE_WINDOW_S
    rows = shortage.clear_rows(history, cut, end + 1)
    onset_in, known_s = history.outcome(rows, end)
    horizons = np.asarray(horizons_s)
    came = onset_in[:, None] <= horizons
    names_of = (MODEL, *shortage.BASELINES)
    given = {name: np.zeros((len(rows), len(horizons_s))) for name in names_of}
    rank = {name: np.zeros((len(rows), len(horizons_s))) for name in shortage.BASELINES}
    firsts = [cut] if refit_days is None else np.arange(cut, end, refit_days * 86_400).tolist()
    for i, first in enumerate(firsts):
        last = firsts[i + 1] if i + 1 < len(firsts) else end + 1
        until = first - horizons_s[-1] - SHORTAGE_WINDOW_S
        step("fitting" if len(firsts) == 1 else f"fit {i + 1} of {len(firsts)}")
        try:
            model = ShortageForecaster.fit(history, until, horizons_s=horizons_s, seed=seed, threads=threads)
        except ShortageModelError as error:
            raise OnsetBacktestError(str(error)) from None
        mine = (history.ts[rows] >= first) & (history.ts[rows] < last)
        train = shortage.clear_rows(history, begin, until)
        given[MODEL][mine] = model.forecast(history, rows[mine], threads=threads)
        for name in shortage.BASELINES:
            given[name][mine], rank[name][mine] = shortage.baseline(name, history, train, until, rows[mine], horizons_s)
    onset = history.onset_row[history.ts[history.onset_row] >= cut]
    if not len(onset):
        raise OnsetBacktestError("the last 30 % of the record hold no onset of shortage: there is nothing to judge")
    judged = Judged(
        tuple(horizons_s), history.gpu[rows], history.ts[rows], came, came | (known_s[:, None] >= horizons),
        history.gpu[onset], history.ts[onset], given, rank,
    )  # fmt: skip
    names = np.array(history.names, dtype=object)
    step("scoring")
    return report_of_events(
        judged, kind="bottleneck", subject="shortage", unit="queue", span_s=(cut, end), train_end_s=train_end,
        notes=[
            "Occupancy alone is no alarm: it does not show who is about to submit what. These probabilities rank "
            "queues and moments; few of them are high enough to act on.",
            *([] if refit_days is None else [f"{len(firsts)} fits, each on what was known by then."]),
        ],
        predictions=prediction_rows(
            judged, history.cluster, queue=pl.Series(names[judged.unit].tolist(), dtype=pl.String)
        ),
        seed=seed,
    )  # fmt: skip


def backtest_straggler(timeline: pl.DataFrame, *, seed: int = 1, step: Step = unheard) -> EventReport:
    """Backtest `straggler` on an operation timeline. Nothing is learned, so that every step is judged.

    Args:
        timeline: As of `features.straggler.step_times`.
        seed: Seed of the bootstrap.
        step: Told what is begun.

    Raises:
        features.straggler.TimelineError: The timeline cannot be used.
        OnsetBacktestError: It is too short.
    """
    step("compute times of ranks")
    times = step_times(timeline)
    if len(times.steps) <= straggler.HORIZON_STEPS:
        raise OnsetBacktestError(
            f"the timeline holds {len(times.steps)} steps: more than {straggler.HORIZON_STEPS} are needed, for that is "
            "how far ahead it is judged"
        )
    probability = straggler.forecast(times)
    came, known = straggler.outcomes(times)
    at, rank = np.nonzero(~np.isnan(probability))
    horizon_s = float(np.median(np.diff(times.at_s))) * straggler.HORIZON_STEPS
    ranking = {name: np.nan_to_num(straggler.baseline(name, times)[at, rank])[:, None] for name in straggler.BASELINES}
    # Rules that only rank get their probabilities from the same steps: nothing here is learned beforehand.
    ok = known[at, rank]
    given = {MODEL: probability[at, rank][:, None]}
    for name, score in ranking.items():
        given[name] = probabilities(score[ok, 0], came[at, rank][ok], score[:, 0])[:, None]
    set_before = np.vstack((np.zeros((1, times.state.shape[1]), dtype=bool), times.state[:-1] == 1))
    onset_at, onset_rank = np.nonzero((times.state == 1) & ~set_before)
    judged = Judged(
        (horizon_s,), rank, times.at_s[at], came[at, rank][:, None], known[at, rank][:, None],
        onset_rank, times.at_s[onset_at], given, ranking,
    )  # fmt: skip
    notes = [_found(times, probability), _clock_note(times)]
    notes.append(
        "Baselines got their probabilities from these very steps, which flatters them; their ranking is their own."
    )
    own, best = (event_scores.RankedRows(came[at, rank][ok], r[ok, 0]).average_precision()
                 for r in (given[MODEL], ranking["ewma_z_score"]))  # fmt: skip
    if best > 0:
        notes.append(f"Average precision is {own / best:.1f} × that of the EWMA z-score against a rank's own past.")
    frame = prediction_rows(
        judged, _text(timeline, "cluster"), rank=pl.Series(times.ranks[rank]), step=pl.Series(times.steps[at])
    )
    return report_of_events(
        judged, kind="bottleneck", subject="straggler", unit="rank",
        span_s=(float(times.at_s[0]), float(times.at_s[-1])),
        train_end_s=None, notes=[note for note in notes if note], predictions=frame, seed=seed,
    )  # fmt: skip


def detection_steps(times: StepTimes, probability: Floats, threshold: float = 0.5) -> dict[int, int | None]:
    """Steps from the first slow step of each slow spell until the forecast stood at a threshold, by rank.

    Returns:
        Rank to steps, that one included; None where it was not found while the spell lasted.
    """
    out: dict[int, int | None] = {}
    slow = np.nan_to_num(times.log_ratio, nan=-1.0) > np.log(straggler.SLOW_RATIO)
    for j, rank in enumerate(times.ranks.tolist()):
        set_at = np.flatnonzero(times.state[:, j] == 1)
        if not len(set_at):
            continue
        first = int(set_at[0])
        while first > 0 and slow[first - 1, j]:
            first -= 1
        spell = np.arange(first, int(set_at[-1]) + 1)
        hit = spell[np.nan_to_num(probability[spell, j]) >= threshold]
        out[rank] = int(hit[0]) - first + 1 if len(hit) else None
    return out


def _found(times: StepTimes, probability: Floats) -> str:
    found = detection_steps(times, probability)
    if not found:
        return "No rank is slow in this record."
    words = [f"rank {r} {'not' if n is None else f'after {n} of its slow steps'}" for r, n in sorted(found.items())]
    return f"Slow ranks found at P ≥ 0.5: {', '.join(words[:20])}{' …' if len(words) > 20 else ''}."


def _clock_note(times: StepTimes) -> str:
    if times.is_clock:
        return ""
    return "Times of this record begin anew at each step: ts adds up the recorded steps, from 1970-01-01."


def prediction_rows(judged: Judged, cluster: str, **units: pl.Series) -> pl.DataFrame:
    """Forecasts of the model: `ts`, `cluster`, `node`, `gpu_uuid`, `horizon_s`, `p_onset`, and what `units` names.

    Args:
        judged: Forecasts of the test.
        cluster: Name of the cluster; empty: null.
        **units: Column to the value of each row of `judged`.
    """
    n = len(judged.unit)
    base = pl.DataFrame(
        {
            "ts": pl.Series(np.round(judged.at_s * 1e6).astype(np.int64)).cast(pl.Datetime("us", "UTC")),
            "cluster": pl.Series([cluster or None] * n, dtype=pl.String),
            "node": units.pop("node", pl.Series([None] * n, dtype=pl.String)),
            "gpu_uuid": units.pop("gpu_uuid", pl.Series([None] * n, dtype=pl.String)),
        }
    )
    parts = [
        base.with_columns(
            pl.lit(horizon_s).alias("horizon_s"), pl.Series("p_onset", judged.given[MODEL][:, k]),
            *(values.alias(name) for name, values in units.items()),
        )
        for k, horizon_s in enumerate(judged.horizons_s)
    ]  # fmt: skip
    return pl.concat(parts).sort("ts", "node", *units, "gpu_uuid", "horizon_s")


def _text(frame: pl.DataFrame, column: str) -> str:
    return str(frame[column][0]) if column in frame.columns and frame.height else ""
