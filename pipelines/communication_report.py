"""What `weatherglass communication` prints: what part of their steps jobs spend on communication, which links are hot.

Only reading and words; the figures are made by `features/communication.py`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import polars as pl

from features.communication import HIGH_RATIO, HOT_RATIO, LINKS, hot_links, job_communication
from features.thresholds import ThresholdBook

if TYPE_CHECKING:
    from pipelines.settings import Settings
    from pipelines.store import Store

_CELLS = 60  # samples are averaged over this part of the span, so that what is held does not grow with it
_GPUS = """
SELECT node, gpu_uuid, job_id, time_bucket(to_microseconds($cell), ts) AS ts,
    avg(nvlink_tx_bytes_per_s) AS nvlink_tx_bytes_per_s, avg(nvlink_rx_bytes_per_s) AS nvlink_rx_bytes_per_s,
    avg(coalesce(engine_active_ratio, gpu_util_ratio, sm_active_ratio)) AS engine_active_ratio
FROM core_gpu_samples WHERE "cluster" = $cluster AND ts >= $begin AND ts < $end GROUP BY ALL
"""
_PORTS = """
SELECT node, device, port, time_bucket(to_microseconds($cell), ts) AS ts, avg(tx_bytes_per_s) AS tx_bytes_per_s,
    avg(rx_bytes_per_s) AS rx_bytes_per_s, max(speed_bytes_per_s) AS speed_bytes_per_s
FROM core_port_samples WHERE "cluster" = $cluster AND ts >= $begin AND ts < $end GROUP BY ALL
"""
_PROGRESS = """
SELECT job_id, rank, ts, step_time_s, communication_time_s FROM core_job_progress
WHERE "cluster" = $cluster AND ts >= $begin AND ts < $end AND communication_time_s IS NOT NULL
"""


def read_communication(
    store: Store, cluster: str, begin: datetime, end: datetime, book: ThresholdBook
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Jobs and links of a cluster over [begin, end), UTC, as `job_communication` and `hot_links` give them.

    Raises:
        StoreError: The store cannot be read.
    """
    bound = {"cluster": cluster, "begin": begin, "end": end}
    cell = {"cell": max(int((end - begin).total_seconds() * 1e6) // _CELLS, 60_000_000)}
    with store.reader() as reader:  # of one moment
        samples, ports = reader.query(_GPUS, bound | cell), reader.query(_PORTS, bound | cell)
        progress = reader.query(_PROGRESS, bound)
    return job_communication(samples, ports, progress, book), hot_links(samples, ports, book)


def print_communication(
    settings: Settings, cluster: str | None, now: datetime, since: timedelta, *, top: int, as_json: bool = False
) -> None:
    """Print jobs by the share of their steps that goes to communication, and the fullest links.

    Args:
        settings: All settings.
        cluster: Name of the cluster; None: all.
        now: Present time, UTC.
        since: How far back.
        top: Jobs, and links, at most.
        as_json: Print JSON, all of it.

    Raises:
        SettingsError: There is no such cluster, or none at all.
        StoreError: There is no store yet, or it cannot be read.
    """
    from pipelines.compose import clusters_of, open_store
    from pipelines.job_history import read_nodes

    out = []
    names = clusters_of(settings, cluster)
    with open_store(settings, read_only=True) as store:
        for name in names:
            book = ThresholdBook.from_nodes(read_nodes(store, name), overrides=settings.ingest.limits)
            jobs, links = read_communication(store, name, now - since, now, book)
            if as_json:
                out.append({"cluster": name, "jobs": jobs.to_dicts(), "links": links.to_dicts()})
            else:
                print("\n".join(communication_lines(name, jobs, links, since, top)))
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(out), indent=2).decode())


def communication_lines(cluster: str, jobs: pl.DataFrame, links: pl.DataFrame, since: timedelta, top: int) -> list[str]:
    """The lines of one cluster.

    Args:
        cluster: Its name.
        jobs: As of `job_communication`.
        links: As of `hot_links`.
        since: How far back they reach.
        top: Jobs, and links, at most.
    """
    from pipelines.words import counted

    told = jobs.filter(pl.col("communication_ratio").is_not_null())
    minutes = since.total_seconds() / 60
    if not told.height and not links.height:
        return [
            f"{cluster}: nothing tells of communication in the last {minutes:.0f} min: neither reports of jobs "
            "(POST /v1/progress, communication_time_s) nor rates of NVLinks or ports are stored"
        ]
    high = told.filter("is_high")
    lines = [
        f"{cluster}, last {minutes:.0f} min: {counted(told.height, 'job')} of which communication is known, "
        f"{high.height:,} at {HIGH_RATIO:.0%} of their steps or more"
    ]
    width = max((len(str(row["job_id"])) for row in told.head(top).to_dicts()), default=3)
    if told.height:
        lines.append(f"  {'job':<{width}}   GPUs  communication    NVLink  network  slowest rank ÷ gang")
    for row in told.head(top).to_dicts():
        share = f"{'≥ ' if row['basis'] == LINKS else ''}{row['communication_ratio']:.0%}"
        skew = (
            "not known"
            if row["gang_skew_ratio"] is None
            else f"{row['gang_skew_ratio']:.2f} (rank {row['slowest_rank']})"
        )
        gpus = "?" if row["gpus"] is None else f"{row['gpus']:,}"
        lines.append(
            f"  {row['job_id']:<{width}}  {gpus:>5}  {share:>8} {'high' if row['is_high'] else '':<4}   "
            f"{_share(row['nvlink_ratio']):>7}  {_share(row['port_ratio']):>7}  {skew}"
        )
    if told.height > top:
        lines.append(f"  … and {counted(told.height - top, 'more job', 'more jobs')}: --top {told.height}, or --json")
    if LINKS in told["basis"]:
        lines.append(
            "  ≥: from what went over the links, a lower bound; jobs that report communication_time_s say it exactly"
        )
    hot = links.filter(pl.col("hot_ratio") > 0)
    lines.append(
        f"  {counted(links.height, 'link')}, {hot.height:,} of them at {HOT_RATIO:.0%} of what they carry at some time"
    )
    for row in hot.head(top).to_dicts():
        lines.append(
            f"  {row['kind']:<6}  {row['node']}  {row['link']}: 95 % of the time up to {row['load_p95_ratio']:.0%}, "
            f"mean {row['load_mean_ratio']:.0%}, full in {row['hot_ratio']:.0%} of {counted(row['samples'], 'look')}"
        )
    return lines


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"
