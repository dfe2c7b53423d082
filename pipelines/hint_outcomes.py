"""Each night: yesterday's bottleneck hints are joined to the labels of their scope, by the rules that train forecasts.

Rows are kept in `out_hint_outcomes`. Here belong reading and keeping; what is true and how it is scored stands in
`models/hint_scores.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

import msgspec
import polars as pl

from features.vocabulary import schema
from models.backtest_report import Score
from models.hint_scores import Judged, Said, caught, drifted, hint_scores, hint_words, judge_hints
from models.outcome_verdicts import Verdict
from pipelines.exclusions import read_exclusions
from pipelines.store import Reader, Store
from scheduler_hints.schema import HORIZONS_S, Bottleneck

TABLE = "out_hint_outcomes"
DAY = timedelta(days=1)
RECENT, BEFORE = 7 * DAY, 28 * DAY
_BACK = timedelta(hours=6)  # a hint that has stood since then is no news of the day
_LONGEST = timedelta(seconds=max(HORIZONS_S))
_decode = msgspec.json.Decoder(Bottleneck).decode


@dataclass
class HintOutcomes:
    """What a night found of the hints of the day before.

    Attributes:
        rows: Rows of `out_hint_outcomes`, one a hint.
        scores: Figures of the newest week.
        verdict: Whether hints still come true as often as before.
        words: Figures of each class, in sentences.
    """

    rows: pl.DataFrame
    scores: list[Score] = field(default_factory=list)
    verdict: Verdict | None = None
    words: list[str] = field(default_factory=list)


def score_hints(store: Store, cluster: str, until: datetime) -> HintOutcomes:
    """Judge the hints that became visible in the day before `until`, and figures of the week before it.

    Args:
        store: The store.
        cluster: Name of the cluster.
        until: End of the day, UTC; labels are settled by then, or those that are not are missed.

    Returns:
        What was found; nothing is kept.

    Raises:
        StoreError: The store cannot be read.
    """
    begin = until - DAY
    with store.reader() as reader:
        said = read_hints(reader, cluster, begin - _BACK, until)
        labels = _labels(reader, cluster, begin - _LONGEST, until + _LONGEST)
        excluded = read_exclusions(reader, cluster, begin, until + _LONGEST, drained_since=until)
        ours = [one for one in said if one.visible_at >= begin]
        minutes = _minutes(reader, cluster, begin, until, ours)
        kept = reader.query(
            f'SELECT * FROM {TABLE} WHERE "cluster" = ? AND generated_at >= ? AND generated_at < ?',
            [cluster, until - RECENT - BEFORE, begin],
        )
        week = _labels(reader, cluster, until - RECENT, until)
        earlier = read_hints(reader, cluster, until - RECENT - _BACK, until)
    rows = _rows(cluster, judge_hints(ours, labels, excluded, lambda one: _is_watched(one, minutes)))
    whole = pl.concat([kept.select(rows.columns), rows])
    recent = whole.filter(pl.col("generated_at") >= until - RECENT)
    scores = hint_scores(recent, caught(week, earlier))
    verdict = drifted(recent, whole.filter(pl.col("generated_at") < until - RECENT))
    return HintOutcomes(rows, scores, verdict, hint_words(scores))


def read_hints(reader: Reader, cluster: str, begin: datetime, until: datetime) -> list[Said]:
    """Hints that were forecasts when they were first published within [begin, until), in order of that.

    One whose condition was set already when it was first published was never a forecast.
    """
    rows = reader.query(
        "SELECT hint_id, generated_at, horizon_s, detail FROM out_hints WHERE \"cluster\" = ? AND kind = 'bottlenecks' "
        "AND hint_id <> '' AND generated_at >= ? AND generated_at < ? ORDER BY generated_at",
        [cluster, begin, until + _LONGEST],
    )
    first: dict[str, tuple[datetime, Bottleneck]] = {}
    claims: dict[str, datetime] = {}
    for id_, at, horizon_s, detail in rows.iter_rows():
        try:
            hint = _decode(detail)
        except (msgspec.DecodeError, TypeError):
            continue
        first.setdefault(id_, (at, hint))
        if not hint.is_active:
            claims[id_] = max(claims.get(id_, at), at + timedelta(seconds=horizon_s or hint.horizon_s))
    return [
        Said(
            id_, hint.bottleneck_class, hint.scope, hint.gpu_uuid,
            tuple(dict.fromkeys([*hint.nodes, *([hint.node] if hint.node else [])])), hint.unit, at, claims[id_],
            hint.horizon_s, hint.probability, hint.model_version, hint.is_held_out,
        )
        for id_, (at, hint) in first.items()
        if not hint.is_active and at < until
    ]  # fmt: skip


def _labels(reader: Reader, cluster: str, begin: datetime, until: datetime) -> pl.DataFrame:
    return reader.query(
        "SELECT bottleneck_class, scope_id, node, gpu_uuid, onset_time, coalesce(is_censored, false) AS is_censored "
        'FROM feat_labels WHERE "cluster" = ? AND onset_time >= ? AND onset_time < ?',
        [cluster, begin, until],
    )


def _minutes(reader: Reader, cluster: str, begin: datetime, until: datetime, said: list[Said]) -> set[tuple]:
    """Node and minute of every minute in which a node of a hint gave samples."""
    nodes = sorted({node for one in said for node in one.nodes})
    if not nodes:
        return set()
    found = reader.query(
        'SELECT DISTINCT node, ts FROM core_gpu_minutes WHERE "cluster" = ? AND ts >= ? AND ts < ? AND node = ANY(?)',
        [cluster, begin - timedelta(minutes=1), until + _LONGEST, nodes],
    )
    return set(found.iter_rows())


def _is_watched(one: Said, minutes: set[tuple]) -> bool:
    at = one.visible_at.replace(second=0, microsecond=0)
    while at <= one.claimed_until:
        if any((node, at) not in minutes for node in one.nodes):
            return False
        at += timedelta(minutes=1)
    return True


def _rows(cluster: str, judged: list[Judged]) -> pl.DataFrame:
    rows = [
        {
            "generated_at": one.said.visible_at, "cluster": cluster, "hint_id": one.said.hint_id,
            "bottleneck_class": one.said.bottleneck_class, "scope": one.said.scope,
            "node": ",".join(one.said.nodes) or None, "gpu_uuid": one.said.gpu_uuid, "horizon_s": one.said.horizon_s,
            "probability": one.said.probability, "model_version": one.said.model_version,
            "is_held_out": one.said.is_held_out, "verdict": one.fate, "reason": one.reason or None,
            "onset_time": one.onset, "lead_s": one.lead_s, "claimed_until": one.said.claimed_until,
        }
        for one in judged
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=schema(TABLE))
