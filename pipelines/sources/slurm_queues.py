"""What Slurm's exporters and Slurm itself say of partitions, accounts and users, as rows of `core_queue_samples`.

Names stay as exposed, without `slurm_`; the partition is the queue, other labels follow a colon, as
`user_jobs_pending:ada` or `pending_reason_total:Priority`. Units are those of the vocabulary, whatever a name says.
Left out: nodes and jobs one by one, of which Slurm is asked itself, calls, and what is not to be believed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache

import polars as pl

from features.exporters import slurm
from features.exporters.metric import Metric
from pipelines.sources.kubernetes_series import Asks, plain_labels, selecting
from pipelines.sources.queue_series import QueueSeries, read_queue_series

_PREFIX = "slurm_"
_ONE_BY_ONE = r"slurm_(node_(cpu|mem|gpu).*|job_.*|(user_)?rpc.*|.*_scrape_duration)"
_SOURCES = {"vpenso": "slurm-vpenso", "rivosinc": "slurm-rivosinc", "Slinky": "slurm-slinky", "itself": "slurm"}
# Names that only one of them has: they tell whose the others of that instance are.
_SIGNS = {
    "slurm-vpenso": r"slurm_(queue_|scheduler_(threads|queue_size|last_cycle))",
    "slurm-rivosinc": r"slurm_((partition_job|account_job|user)_state_total|node_count_per_state|pending_reason_total)",
    "slurm-slinky": r"slurm_(bfscheduler_|scheduler_cycle_|jobs_\w+_total)",
    "slurm": r"slurm_(bf_|sched_|jobs_memory_alloc|jobs$)",
}
_SUFFIXES = ("user", "username", "account", "state", "status", "reason")


def _source(row: Metric) -> str:
    return next(source for word, source in _SOURCES.items() if word in row.exporter)


def _pattern(row: Metric) -> str:
    return row.name.replace("*", ".*")


@cache
def _rows() -> tuple[Metric, ...]:
    """Rows of the vocabulary that are kept, the most literal first."""
    kept = [row for row in slurm.ROWS if not re.fullmatch(_ONE_BY_ONE, row.name)]
    return tuple(sorted(kept, key=lambda row: (row.name.count("*"), -len(row.name))))


def slurm_queue_samples(
    api: Asks, cluster: str, start: datetime, end: datetime, *, matcher: str = "", step_s: int = 60
) -> pl.DataFrame:
    """Samples of queues with start ≤ ts < end; one query.

    Args:
        api: The Prometheus.
        cluster: Name of the cluster.
        start: Start of the span, UTC.
        end: End of the span, UTC.
        matcher: Further label matchers, as of the setting; empty: none.
        step_s: Seconds between samples.

    Returns:
        Rows of `core_queue_samples`; none where no exporter of Slurm is there.

    Raises:
        SourceError: No whole answer came.
    """
    names = "|".join(dict.fromkeys(_pattern(row) for row in _rows()))
    selector = selecting(f'__name__=~"{names}",__name__!~"{_ONE_BY_ONE}"', matcher)
    return read_queue_series(api, cluster, start, end, selector, _identities, step_s)


def _identities(series: Sequence[dict[str, str]]) -> list[QueueSeries | None]:
    """What each series is; whose, by what else its instance exposes."""
    seen: dict[tuple[str, str], set[str]] = {}
    for labels in series:
        seen.setdefault(_instance(labels), set()).add(labels.get("__name__", ""))
    owners = {instance: _owner(frozenset(names)) for instance, names in seen.items()}
    return [_identity(labels, owners[_instance(labels)]) for labels in series]


def _instance(labels: dict[str, str]) -> tuple[str, str]:
    return labels.get("job", ""), labels.get("instance", "")


def _owner(names: frozenset[str]) -> str | None:
    """The exporter of an instance; None where nothing tells, or several stand behind it."""
    found = [source for source, sign in _SIGNS.items() if any(re.match(sign, name) for name in names)]
    return found[0] if len(found) == 1 else None


@cache
def _row_of(name: str, owner: str | None) -> Metric | None:
    """The row that tells of a name; None where there is none, or owners that are not known would differ in its unit."""
    if re.fullmatch(_ONE_BY_ONE, name):
        return None
    rows = [row for row in _rows() if re.fullmatch(_pattern(row), name)]
    own = [row for row in rows if _source(row) == owner]
    if not own:
        first = {_source(row): row for row in reversed(rows)}  # of each exporter the most literal
        if len({row.scale for row in first.values()}) != 1:
            return None
    row = (own or rows)[0]
    return row if row.column else None


def _identity(labels: dict[str, str], owner: str | None) -> QueueSeries | None:
    name = labels.get("__name__", "")
    row = _row_of(name, owner)
    if row is None:
        return None
    plain = plain_labels(labels)
    queue = plain.get("partition", "")
    metric = name.removeprefix(_PREFIX).removeprefix("partition_" if queue else "")
    if row.scale == 1e-6 and "seconds" not in metric:
        metric += "_s"
    told = [plain[label] for label in _SUFFIXES if plain.get(label)]
    return QueueSeries(_source(row), queue, ":".join([metric, *told]), row.scale)
