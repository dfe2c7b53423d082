"""Samples straight from exporters' `/metrics`, for a small cluster without Prometheus and for the demo.

`latest` reads every target at once and keeps what it read in the spool, from which `fetch` answers: exporters have no
history. One dead target is a warning and a node that is not up; it holds nobody else up. Parsing stands in
`exposition.py`, files in `spool.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
import polars as pl

from features.metrics import GPU_NAMES, METRICS, node_name, short_host
from pipelines.sources import Fetched, Finding, SourceError, gpu_frame, node_frame
from pipelines.sources.exposition import ExpositionError, Page, parse_page
from pipelines.sources.prometheus import metric_gaps
from pipelines.sources.spool import Spool
from pipelines.sources.wide import Index, Samples, to_frames

_SD_PREFIX = "sd+"
_SD_PERIOD_S = 30.0
_WORKERS = 16
_SPOOL_KEPT = timedelta(days=2)  # when nobody ingests: the disk must not fill
_ACCEPT = {"Accept": "text/plain;version=0.0.4;q=1,*/*;q=0.1"}


@dataclass(frozen=True, slots=True)
class Target:
    """One page to read; `node` is empty until labels or the page told it."""

    url: str
    node: str


class ScrapeSource:
    """Samples of one cluster from its exporters.

    Args:
        name: Name of the cluster.
        targets: URLs of pages, or one http_sd URL with `sd+` before it.
        spool: Folder of the spool.
        timeout_s: Time-out of one page, s.
        tick_s: How often `latest` is called, s.
        clock: Gives the time, UTC.
    """

    def __init__(
        self,
        name: str,
        targets: Sequence[str],
        spool: Path,
        *,
        timeout_s: float = 10,
        tick_s: float = 15,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        if not targets:
            raise SourceError(f"{name}: set clusters.{name}.scrape_targets: URLs of /metrics pages, or sd+URL")
        for url in targets:
            if urlsplit(url.removeprefix(_SD_PREFIX)).scheme not in ("http", "https"):
                raise SourceError(f"{name}: scrape_targets: {url!r} is no http(s) URL")
        self.name = name
        self.watermark_lag_s = tick_s
        self.spool = Spool(spool)
        self._static = [Target(url, "") for url in targets if not url.startswith(_SD_PREFIX)]
        self._sd_urls = [url.removeprefix(_SD_PREFIX) for url in targets if url.startswith(_SD_PREFIX)]
        self._found: dict[str, list[Target]] = {}
        self._sd_read_s = -_SD_PERIOD_S
        self._learned: dict[str, str] = {}  # URL → node, as its page told
        self._index = Index()
        self._clock = clock
        self._pruned = datetime.min.replace(tzinfo=UTC)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.Client(timeout=timeout_s, limits=limits, headers=_ACCEPT, follow_redirects=True)
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix=f"scrape-{name}")
        self._timeout_s = timeout_s

    def fetch(self, start: datetime, end: datetime) -> Fetched:
        """What `latest` read in [start, end), from the spool."""
        gpu, warnings = self.spool.read("gpu", start, end)
        node, more = self.spool.read("node", start, end)
        return Fetched(gpu_frame(gpu), node_frame(node), [f"{self.name}: {text}" for text in warnings + more])

    def latest(self) -> Fetched:
        """Read every target now and keep the samples in the spool.

        Raises:
            SourceError: No list of targets could be had.
        """
        targets, warnings = self._targets()
        at = self._clock()
        fetched = self._read(targets, at, warnings)
        try:
            for kind, frame in (("gpu", fetched.gpu), ("node", fetched.node)):
                if len(frame):
                    self.spool.append(kind, frame, at)
            if at - self._pruned > timedelta(hours=1):
                self.spool.prune(at - _SPOOL_KEPT)
                self._pruned = at
        except OSError as error:
            fetched.warnings.append(f"{self.name}: spool {self.spool.folder} cannot be written: {error}: free the disk")
        return fetched

    def prune(self, before: datetime) -> int:
        """Remove spooled minutes that ended before that time; returns how many files."""
        return self.spool.prune(before)

    def _read(self, targets: list[Target], at: datetime, warnings: list[str]) -> Fetched:
        self._index.prune(len(targets) * len(GPU_NAMES) * 8)
        names: list[int] = []
        entities: list[int] = []
        times: list[int] = []
        values: list[float] = []
        up: dict[str, bool] = {}
        for target, (page, trouble, read_ms) in zip(targets, self._pool.map(self._page, targets), strict=True):
            node = target.node or self._learned.get(target.url, "")
            if isinstance(page, str):
                try:
                    samples = parse_page(page, self._index, target.node, target.url)
                except ExpositionError as error:
                    trouble = f"{target.url} is no metrics page: {error}"
                else:
                    names += samples.names
                    entities += samples.entities
                    values += samples.values
                    times += [read_ms if ts is None else ts for ts in samples.ts_ms]
                    node = node or self._learn(target, samples)
            node = node or short_host(urlsplit(target.url).netloc.rsplit("@", 1)[-1])
            up[node] = up.get(node, False) or not trouble
            if trouble:
                warnings.append(f"{self.name}: {trouble}")
        flat = Samples(
            np.array(names, np.int64),
            np.array(entities, np.int64),
            np.ones(len(names), np.int64),
            np.array(times, np.int64),
            np.array(values, np.float64),
        )
        gpu, node_samples, _, _ = to_frames(flat, self._index, self.name)
        return Fetched(gpu, _with_up(node_samples, up, at, self.name), warnings)

    def _learn(self, target: Target, samples: Page) -> str:
        if not samples.entities:
            return ""
        node = self._index.entities[samples.entities[0]].node
        self._learned[target.url] = node
        return node

    def _page(self, target: Target) -> tuple[str | None, str, int]:
        """Text, or what went wrong; and when it was asked for, ms since the epoch."""
        read_ms = round(self._clock().timestamp() * 1000)
        try:
            with self._http.stream("GET", target.url) as response:
                if response.status_code != 200:
                    return None, f"{target.url} answered HTTP {response.status_code}", read_ms
                parts, deadline = [], time.monotonic() + self._timeout_s
                for part in response.iter_bytes():
                    parts.append(part)
                    if time.monotonic() > deadline:
                        return None, f"{target.url} did not end within {self._timeout_s:g} s", read_ms
            return b"".join(parts).decode("utf-8", "replace"), "", read_ms
        except httpx.TimeoutException:
            return None, f"{target.url} did not answer within {self._timeout_s:g} s", read_ms
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return None, f"{target.url} cannot be read: {error or type(error).__name__}", read_ms

    def _targets(self) -> tuple[list[Target], list[str]]:
        warnings: list[str] = []
        now = time.monotonic()
        if self._sd_urls and now - self._sd_read_s >= _SD_PERIOD_S:
            for url in self._sd_urls:
                try:
                    self._found[url] = self._discover(url)
                except SourceError as error:
                    if url not in self._found:
                        raise
                    warnings.append(f"{error}; the targets it gave before are read")
                else:
                    self._sd_read_s = now
        targets = [*self._static, *(target for found in self._found.values() for target in found)]
        if not targets:
            raise SourceError(f"{self.name}: {', '.join(self._sd_urls)} lists no targets")
        return targets, warnings

    def _discover(self, url: str) -> list[Target]:
        where = f"{self.name}: service discovery {url}"
        try:
            answer = self._http.get(url, headers={"Accept": "application/json"})
            answer.raise_for_status()
            groups: Any = msgspec.json.decode(answer.content)
            found = []
            for group in groups:
                labels = {str(k): str(v) for k, v in (group.get("labels") or {}).items()}
                scheme, path = labels.get("__scheme__", "http"), labels.get("__metrics_path__", "/metrics")
                node = node_name({k: v for k, v in labels.items() if k != "instance"})
                found += [Target(f"{scheme}://{host}{path}", node) for host in group["targets"]]
        except httpx.HTTPStatusError as error:
            raise SourceError(f"{where} answered HTTP {error.response.status_code}") from error
        except httpx.HTTPError as error:
            raise SourceError(f"{where} cannot be read: {error or type(error).__name__}: is it running?") from error
        except (msgspec.DecodeError, AttributeError, KeyError, TypeError) as error:
            raise SourceError(f"{where} is no http_sd list ([{{targets, labels}}]): {error!r}") from error
        return found

    def check(self) -> list[Finding]:
        """Targets that answer, and the quantities they give. Nothing goes into the spool."""
        try:
            targets, warnings = self._targets()
        except SourceError as error:
            return [("reachable", False, str(error))]
        fetched = self._read(targets, self._clock(), warnings)
        dead = len(fetched.warnings)
        text = f"{len(targets) - dead} of {len(targets)} targets answer"
        findings: list[Finding] = [("reachable", not dead, "; ".join([text, *fetched.warnings[:3]]))]
        columns = {name for name in fetched.gpu.columns if fetched.gpu[name].null_count() < len(fetched.gpu)}
        gpus = fetched.gpu["gpu_uuid"].n_unique()
        lacking = "" if gpus else f": none of {len(METRICS)} known metrics is on these pages; are they GPU exporters?"
        findings.append(("metrics", gpus > 0, f"{gpus} GPUs{lacking}"))
        if gpus:
            findings += metric_gaps(columns)
        findings.append(self._spool_finding())
        return findings

    def _spool_finding(self) -> Finding:
        folder = self.spool.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".probe"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            return ("spool", False, f"{folder} cannot be written: {error.strerror}: give this user the right to")
        return ("spool", True, f"{folder} can be written")

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self._http.close()


def _with_up(samples: pl.DataFrame, up: dict[str, bool], at: datetime, cluster: str) -> pl.DataFrame:
    """One row a node at the time of the reading, with what its own sensors gave then."""
    nodes = pl.DataFrame(
        {"node": list(up), "is_up": list(up.values())}, schema={"node": pl.String, "is_up": pl.Boolean}
    )
    sensors = samples.group_by("node").agg(pl.col("inlet_temp_c", "node_power_w").max())
    rows = nodes.join(sensors, on="node", how="left").with_columns(ts=pl.lit(at), cluster=pl.lit(cluster))
    return node_frame(rows)
