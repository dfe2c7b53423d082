"""Whether published bottleneck hints came true: each beside the labels of its scope, and how precise all of them were.

Pure: hints and labels come in as frames, rows and figures go out. Reading and keeping: `pipelines/hint_outcomes.py`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import numpy as np
import polars as pl
from scipy.stats import binomtest, fisher_exact

from models.backtest_report import Score
from models.outcome_verdicts import Verdict
from models.promotion import Interval

Fate = Literal["true", "false", "censored"]
TASK = "published_bottleneck"
NAME = "hints_precise"
MIN_HINTS = 20  # that came true or not, before anything is said of them
DRIFT_P = 0.01  # odds of so many more wrong ones by chance


@dataclass(frozen=True, slots=True)
class Said:
    """One hint as it was published, from when it was first visible to the end of its last claim.

    Attributes:
        nodes: Nodes it is about; empty for a queue.
        unit: Name of the queue, for that scope.
        visible_at: When it was first published as a forecast, UTC.
        claimed_until: The latest moment at which a publication said it would have begun.
    """

    hint_id: str
    bottleneck_class: str
    scope: str
    gpu_uuid: str | None
    nodes: tuple[str, ...]
    unit: str | None
    visible_at: datetime
    claimed_until: datetime
    horizon_s: int
    probability: float
    model_version: str
    is_held_out: bool

    def where(self) -> list[tuple[str, str, str]]:
        """Under what labels of its scope are looked up."""
        if self.scope == "queue":
            return [(self.bottleneck_class, "thing", self.unit or "")]
        if self.scope == "gpu" and self.gpu_uuid:
            return [(self.bottleneck_class, "gpu", self.gpu_uuid)]
        return [(self.bottleneck_class, "node", node) for node in self.nodes]


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of a hint. `reason`: why it is false or censored; `onset` and `lead_s` of one that came true."""

    said: Said
    fate: Fate
    reason: str
    onset: datetime | None = None

    @property
    def lead_s(self) -> float | None:
        return None if self.onset is None else (self.onset - self.said.visible_at).total_seconds()


def _label_keys(row: dict) -> Iterable[tuple[str, str, str]]:
    class_ = row["bottleneck_class"]
    if row["gpu_uuid"]:
        yield class_, "gpu", row["gpu_uuid"]
    if row["node"]:
        yield class_, "node", row["node"]
    if row["scope_id"]:
        yield class_, "thing", row["scope_id"]


class Onsets:
    """Onsets of labels by class and GPU, node or thing.

    Args:
        labels: Rows of `feat_labels`.
    """

    def __init__(self, labels: pl.DataFrame) -> None:
        self._by_key: dict[tuple[str, str, str], list[datetime]] = defaultdict(list)
        for row in labels.sort("onset_time").iter_rows(named=True):
            for key in _label_keys(row):
                self._by_key[key].append(row["onset_time"])

    def first(self, said: Said, after: datetime, until: datetime) -> datetime | None:
        """The first within (after, until] of anything that a hint is about."""
        found = []
        for key in said.where():
            times = self._by_key.get(key, [])
            i = bisect_right(times, after)
            if i < bisect_right(times, until):
                found.append(times[i])
        return min(found, default=None)


def judge_hints(
    said: Sequence[Said], labels: pl.DataFrame, excluded: pl.DataFrame, is_watched: Callable[[Said], bool],
    *, late: timedelta = timedelta(seconds=120),
) -> list[Judged]:  # fmt: skip
    """What became of each hint.

    True: an onset of its class in its scope after it was visible, by the end of its last claim. Else censored: when it
    was acted on, silenced, its node out of service, the label itself unknown, or its telemetry had a gap. Else false.

    Args:
        said: Hints.
        labels: Rows of `feat_labels` from `late` before the first of them on.
        excluded: Spans `node`, `bottleneck_class` (null: all), `start`, `end`, as of `read_exclusions`.
        is_watched: Whether samples of all nodes of a hint came without a gap while it stood.
        late: How long before it was visible an onset makes it late, and not merely wrong.
    """
    sure = Onsets(labels.filter(~pl.col("is_censored")))
    unknown = Onsets(labels.filter(pl.col("is_censored")))
    spans = excluded.select("node", "bottleneck_class", "start", "end").rows()
    out = []
    for one in said:
        onset = sure.first(one, one.visible_at, one.claimed_until)
        if onset is not None:
            out.append(Judged(one, "true", "", onset))
        elif _touches(one, spans):
            out.append(Judged(one, "censored", "acted on, silenced or out of service"))
        elif unknown.first(one, one.visible_at - late, one.claimed_until) is not None:
            out.append(Judged(one, "censored", "its label is unknown"))
        elif not is_watched(one):
            out.append(Judged(one, "censored", "telemetry had a gap"))
        else:
            is_late = sure.first(one, one.visible_at - late, one.visible_at) is not None
            out.append(Judged(one, "false", "late" if is_late else "no onset"))
    return out


def _touches(one: Said, spans: Sequence[tuple]) -> bool:
    return any(
        (node is None or node in one.nodes)
        and class_ in (None, one.bottleneck_class)
        and start <= one.claimed_until
        and (end is None or end > one.visible_at)
        for node, class_, start, end in spans
    )


def caught(labels: pl.DataFrame, said: Sequence[Said]) -> pl.DataFrame:
    """Labelled onsets, and whether a hint had been visible for each.

    Args:
        labels: Rows of `feat_labels`; censored ones are left out.
        said: Hints, those that began before the labels included.

    Returns:
        `bottleneck_class`, `onset_time`, `is_caught`, `lead_s` (null where it is not).
    """
    by_key: dict[tuple[str, str, str], list[Said]] = defaultdict(list)
    for one in sorted(said, key=lambda one: one.visible_at):
        for key in one.where():
            by_key[key].append(one)
    rows = []
    for row in labels.filter(~pl.col("is_censored")).iter_rows(named=True):
        at = row["onset_time"]
        leads = []
        for key in _label_keys(row):
            before = by_key.get(key, [])
            before = before[: bisect_left(before, at, key=lambda one: one.visible_at)]
            leads += [(at - one.visible_at).total_seconds() for one in before if at <= one.claimed_until]
        rows.append((row["bottleneck_class"], at, bool(leads), max(leads, default=None)))
    types = {"bottleneck_class": pl.String, "onset_time": pl.Datetime("us", "UTC"), "is_caught": pl.Boolean}
    return pl.DataFrame(rows, schema=types | {"lead_s": pl.Float64}, orient="row")


def share(hits: int, all_: int) -> Interval:
    """A share with its 95 % interval (Wilson); not a number of nothing."""
    if not all_:
        return Interval(float("nan"), None, None, 0)
    ends = binomtest(hits, all_).proportion_ci(method="wilson")
    return Interval(hits / all_, float(ends.low), float(ends.high), 0)


def hint_scores(rows: pl.DataFrame, onsets: pl.DataFrame) -> list[Score]:
    """Figures of all classes and of each.

    Args:
        rows: Of `out_hint_outcomes`.
        onsets: As of `caught`.

    Returns:
        `precision`, `recall` (over all labelled onsets, steps without precursor included), `lead_median_s`,
        `censored_share`, `held_out_precision`; those of a class end in `_` and its name. What nothing is known of is
        left out.
    """
    out: list[Score] = []
    classes = sorted({*rows["bottleneck_class"], *onsets["bottleneck_class"]})
    for name in ("", *classes):
        mine, fell = (part if not name else part.filter(bottleneck_class=name) for part in (rows, onsets))
        end = f"_{name}" if name else ""
        told = mine.filter(pl.col("verdict") != "censored")
        held = told.filter("is_held_out")
        true = told.filter(verdict="true")
        for metric, hits, all_ in (
            ("precision", true.height, told.height), ("recall", int(fell["is_caught"].sum()), fell.height),
            ("censored_share", mine.height - told.height, mine.height),
            ("held_out_precision", held.filter(verdict="true").height, held.height),
        ):  # fmt: skip
            if all_:
                out.append(Score(metric + end, "", share(hits, all_), all_))
        if true.height:
            lead = float(np.median(true["lead_s"].to_numpy()))
            out.append(Score(f"lead_median_s{end}", "", Interval(lead, None, None, 0), true.height))
    return out


def drifted(recent: pl.DataFrame, before: pl.DataFrame) -> Verdict:
    """Whether the newest hints came true about as often as those before; fails when chance is no explanation.

    Args:
        recent: Rows of `out_hint_outcomes` of the newest week.
        before: Of the four weeks before it.
    """
    counts = [[rows.filter(verdict="true").height, rows.filter(verdict="false").height] for rows in (recent, before)]
    (hits, misses), (hits_before, misses_before) = counts
    said = f"of {hits + misses:,} bottleneck hints of the newest week {_percent(hits, misses)} came true"
    if hits + misses < MIN_HINTS or hits_before + misses_before < MIN_HINTS:
        need = f"{hits + misses} of the newest week and {hits_before + misses_before} of the four weeks before"
        words = f"too few bottleneck hints to tell: {need} came true or not, {MIN_HINTS} each needed"
        return Verdict(NAME, True, words, is_judged=False)
    said += f", {_percent(hits_before, misses_before)} of {hits_before + misses_before:,} in the four weeks before"
    if float(fisher_exact(counts, alternative="less").pvalue) >= DRIFT_P:
        return Verdict(NAME, True, said)
    advice = (
        "Schedulers act on hints that come true less often: look which class it is (`weatherglass outcomes`), raise "
        "[hints] publish_probability, or roll back with `weatherglass models rollback`."
    )
    return Verdict(NAME, False, f"{said}. {advice}")


def hint_words(scores: Sequence[Score]) -> list[str]:
    """Precision, recall and lead of each class, in sentences."""
    found = {score.metric: score for score in scores}
    classes = sorted({name.split("_", 1)[1] for name in found if name.startswith(("precision_", "recall_"))})
    words = []
    for class_ in classes:
        precision, recall = found.get(f"precision_{class_}"), found.get(f"recall_{class_}")
        lead = found.get(f"lead_median_s_{class_}")
        parts = []
        if precision:
            parts.append(f"{precision.interval.value:.0%} of {precision.count:,} hints came true")
        if recall:
            parts.append(f"{recall.interval.value:.0%} of {recall.count:,} onsets had been foreseen")
        if lead:
            parts.append(f"{lead.interval.value:.0f} s ahead (median)")
        words.append(f"{class_}: {', '.join(parts)}")
    return words


def _percent(hits: int, misses: int) -> str:
    return f"{hits / (hits + misses):.0%}" if hits + misses else "none"
