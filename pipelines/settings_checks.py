"""Settings that are well-formed each by itself and cannot work together.

Nothing is opened here: files and ports are looked at in `pipelines/settings_files.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pipelines.settings_reading import Problem, shown

if TYPE_CHECKING:
    from pipelines.settings import Cluster, Settings


def contradictions(settings: Settings) -> Iterator[Problem]:
    """What cannot work: location, and the value with what is wrong with it."""
    kind, _, address = settings.store.url.partition(":")
    if kind not in ("sqlite", "postgres") or not address:
        yield ("store", "url"), f"{shown(settings.store.url)}: it must be sqlite:PATH or postgres:DSN"
    codes = settings.derivation
    for code in sorted({*codes.xids_fatal_too} & {*codes.xids_not_fatal}):
        yield (
            ("hardware", "xid"),
            f"{code} is called both fatal and not, by hardware.xid, ingest.xids_fatal_too and ingest.xids_not_fatal: "
            "keep one",
        )
    for name, cluster in settings.clusters.items():
        for setting, text in _of_cluster(cluster):
            yield ("clusters", name, setting), text


def remarks(settings: Settings) -> Iterator[str]:
    """What works, and is hardly meant: one sentence each, beginning with the setting."""
    ingest = settings.ingest
    if ingest.overlap_s > ingest.window_s:
        yield (
            f"ingest.window_s = {ingest.window_s:g}: ingest.overlap_s = {ingest.overlap_s:g} is longer, so that every "
            "sample is read several times: make windows longer or the overlap shorter"
        )
    for name, cluster in settings.clusters.items():
        interval_s = cluster.exporter_interval_s
        if cluster.tick_s < interval_s / 2:
            yield (
                f"clusters.{name}.tick_s = {cluster.tick_s:g}: samples come every {interval_s:g} s only "
                "(exporter_interval_s), so that most ticks see nothing new: make them equal"
            )
        if ingest.window_s < interval_s:
            yield (
                f"ingest.window_s = {ingest.window_s:g}: samples of {name} come every {interval_s:g} s only "
                "(exporter_interval_s), so that windows are empty: make them longer"
            )


_LABEL = r"""(?:[A-Za-z_][A-Za-z0-9_]*|"(?:[^"\\]|\\.)+")"""
_TEXT = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|`[^`]*`)"""
_MATCHER = re.compile(rf"\s*{_LABEL}\s*(?:=~|!~|!=|=)\s*{_TEXT}\s*")


def _matcher_fault(matcher: str) -> str:
    """What is wrong with label matchers; empty: nothing."""
    example = 'it must be label matchers as they stand between braces, as \'cluster="a",dc=~"b|c"\''
    if matcher.strip().startswith("{"):
        return f"write it without the braces: {example}"
    at = 0
    while at < len(matcher):
        found = _MATCHER.match(matcher, at)
        if found is None or (found.end() < len(matcher) and matcher[found.end()] != ","):
            is_bare = re.match(rf"\s*{_LABEL}\s*(?:=~|!~|!=|=)\s*[^\s\"'`]", matcher[at:])
            return f"{'the value wants quotes: ' if is_bare else ''}{example}"
        at = found.end() + 1
    return ""


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number, half an IPv6 address
        return False


def _of_cluster(cluster: Cluster) -> Iterator[tuple[str, str]]:
    if cluster.telemetry == "trace" and not cluster.telemetry_path:
        yield "telemetry_path", "'': telemetry = \"trace\" needs the canonical Parquet file that it reads"
    if cluster.jobs in ("trace", "sacct-file") and not cluster.jobs_path:
        files = "canonical Parquet or SWF" if cluster.jobs == "trace" else "text of sacct"
        yield "jobs_path", f"'': jobs = \"{cluster.jobs}\" needs the file that it reads ({files})"
    asks_prometheus = cluster.telemetry == "prometheus" or cluster.jobs == "kubernetes"
    if asks_prometheus and not _is_http(cluster.prometheus_url):
        yield "prometheus_url", f"{shown(cluster.prometheus_url)}: it must be http://HOST[:PORT] or https://HOST[:PORT]"
    elif asks_prometheus and (found := re.search(r"/api/v1(/.*)?$", urlsplit(cluster.prometheus_url).path)):
        yield "prometheus_url", f"{shown(cluster.prometheus_url)}: it must be the part before {found[0]}"
    if asks_prometheus and (fault := _matcher_fault(cluster.prometheus_matcher)):
        yield "prometheus_matcher", f"{cluster.prometheus_matcher!r}: {fault}"
    rest = cluster.slurm_rest_url
    if rest and not _is_http(rest) and not rest.removeprefix("unix:").startswith("/"):
        yield "slurm_rest_url", f"{shown(rest)}: it must be http://HOST[:PORT] or unix:/PATH"
    yield from _access(cluster)
    if cluster.metrics:
        from features.metrics import MetricError

        try:
            cluster.metric_table()
        except MetricError as error:
            yield "metrics", str(error)
    if cluster.telemetry == "remote-write":
        yield from _receiver(cluster)
    if cluster.telemetry == "scrape":
        choices = "URLs of /metrics pages (http://HOST:PORT/metrics), or sd+URL of an http_sd list"
        if not cluster.scrape_targets:
            yield "scrape_targets", f'[]: telemetry = "scrape" needs {choices}'
        for target in cluster.scrape_targets:
            if not _is_http(target.removeprefix("sd+")):
                yield "scrape_targets", f"{shown(target)}: it must be one of {choices}"


def _access(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """What a cluster's settings for its Prometheus demand of each other."""
    for one, other in (("username", "password_file"), ("password_file", "username"), ("key_file", "cert_file")):
        if getattr(cluster, f"prometheus_{one}") and not getattr(cluster, f"prometheus_{other}"):
            yield f"prometheus_{other}", f"'': prometheus_{one} needs it"
    if cluster.prometheus_token_file and cluster.prometheus_username:
        yield "prometheus_token_file", f"{cluster.prometheus_token_file!r}: either a token or prometheus_username"
    for name, value in cluster.prometheus_headers.items():
        if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or not value.isprintable():
            yield "prometheus_headers", f"{name!r}: a header is a name and one line of text"
        if name.lower() == "authorization" and (cluster.prometheus_token_file or cluster.prometheus_username):
            yield "prometheus_headers", f"{name!r}: prometheus_token_file and prometheus_username set it already"


def _receiver(cluster: Cluster) -> Iterator[tuple[str, str]]:
    from scheduler_hints.tokens import is_loopback

    if not cluster.remote_write_token_file and not is_loopback(cluster.remote_write_host):
        where = f"remote_write_host = {cluster.remote_write_host!r}"
        yield "remote_write_token_file", f"'': {where} is open to others, so senders must give a token"
    if cluster.remote_write_key_file and not cluster.remote_write_cert_file:
        yield "remote_write_cert_file", "'': remote_write_key_file needs it"
