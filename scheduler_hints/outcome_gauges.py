"""How published forecasts did of late, as the nightly run leaves it in a file, and as gauges to raise alerts by.

Here belong the file's shape and its gauges; the figures come from `pipelines/outcomes.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric

from scheduler_hints.snapshot import write_atomically

FILE = "outcomes.json"


class OutcomesWord(msgspec.Struct, frozen=True):
    """What the newest night said of one cluster.

    Attributes:
        until: End of the seven days that it judged, UTC.
        checks: Name → passed; only checks that had enough to judge by.
        figures: Name → value, as `runtime_coverage_80` or `inputs_psi_limit`.
    """

    until: datetime
    checks: dict[str, bool] = {}
    figures: dict[str, float] = {}


decode_word = msgspec.json.Decoder(OutcomesWord).decode


def outcomes_path(published: Path, cluster: str) -> Path:
    """Where the nightly run leaves its word."""
    return published / cluster / FILE


def write_word(published: Path, cluster: str, word: OutcomesWord) -> None:
    """Leave the word of a night.

    Raises:
        OSError: It could not be written; the one before stays.
    """
    path = outcomes_path(published, cluster)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.encode(word))


def outcome_gauges(words: Mapping[str, OutcomesWord], clusters: Sequence[str]) -> Iterable[Metric]:
    """Checks, figures, and how new they are, of the clusters that have any."""
    passed = GaugeMetricFamily(
        "weatherglass_outcomes_check_passed",
        "1 while a nightly check of published forecasts passes, 0 while it does not; absent with too few outcomes.",
        labels=["cluster", "check"],
    )
    figure = GaugeMetricFamily(
        "weatherglass_outcomes_figure",
        "Figures of forecasts published in the last week beside what came.",
        labels=["cluster", "figure"],
    )
    until = GaugeMetricFamily(
        "weatherglass_outcomes_until_timestamp_seconds",
        "End of the week that these speak of, Unix time.",
        labels=["cluster"],
    )
    for cluster in clusters:
        word = words.get(cluster)
        if word is None:
            continue
        until.add_metric([cluster], word.until.timestamp())
        for name, is_passed in sorted(word.checks.items()):
            passed.add_metric([cluster, name], float(is_passed))
        for name, value in sorted(word.figures.items()):
            figure.add_metric([cluster, name], value)
    return passed, figure, until
