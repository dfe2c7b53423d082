"""Asks a Slurm through slurmrestd: history, queue and nodes, whatever version of its schema it speaks.

Answers become the fields that sacct, squeue and scontrol print, so that both ways give the same rows; what the fields
mean stands in `sacct.py` and `slurm_text.py`, how the JSON is spelled in `slurmrestd_fields.py`.
"""

from __future__ import annotations

import getpass
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import polars as pl

from pipelines.sources import SourceError
from pipelines.sources.inventory import NODES_SCHEMA
from pipelines.sources.sacct import jobs_frame
from pipelines.sources.slurm_budget import Budget, Price
from pipelines.sources.slurm_reader import with_priorities
from pipelines.sources.slurm_text import node_row
from pipelines.sources.slurmrestd_fields import (
    accounted_fields,
    list_of,
    node_fields,
    object_of,
    queued_fields,
    step_fields,
    word,
)

_NEWEST = (0, 0, 45)  # newer schemas are read as this one would be, with a warning
_JOBS_PATH = re.compile(r"^/slurm/v(\d+)\.(\d+)\.(\d+)/jobs/?$")
# Requests to slurmctld, counted with sdiag on 22.05; slurmdbd's count for nothing.
_DOCUMENT, _QUEUE, _NODES, _HISTORY = Price(1, 3600, 86_400), Price(1, 15, 120), Price(2, 45, 300), Price(0)
_MAX_ANSWER_BYTES = 2**30  # some 200,000 jobs
_COLUMNS = (
    "JobIDRaw", "JobID", "User", "Account", "Partition", "Submit", "Eligible", "Start", "End", "State", "ExitCode",
    "ElapsedRaw", "SuspendedRaw", "MaxRSS", "RestartCnt", "NNodes", "ReqCPUS", "NCPUS", "ReqTRES", "AllocTRES",
    "TresPerNode", "TresPerJob", "TimelimitRaw", "NodeList", "Constraints", "Reason", "JobName",
)  # fmt: skip
Version = tuple[int, int, int]


class RestReader:
    """slurmrestd of one cluster.

    Args:
        name: Name of the cluster.
        url: `http://HOST:PORT`, `https://…`, or `unix:/PATH`.
        user: Whom the token is for; empty: the user of this process.
        token_file: File with the token, alone or as `scontrol token` prints it; read at each request. Empty: none.
        timeout_s: Time-out of one request, s.
        budget: Requests that all processes together may make; None: no limit.

    Raises:
        SourceError: The URL is none.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        user: str = "",
        token_file: str = "",
        timeout_s: float = 30,
        budget: Budget | None = None,
    ) -> None:
        self.name, self.url, self.timeout_s, self.budget = name, url, timeout_s, budget
        self.warnings: list[str] = []
        self._user, self._token_file = user or getpass.getuser(), token_file
        socket = url.removeprefix("unix:") if url.startswith("unix:") else ""
        if not socket and urlsplit(url).scheme not in ("http", "https"):
            raise SourceError(f"{name}: slurm_rest_url = {url!r}: it must be http://HOST:PORT or unix:/PATH")
        self._socket = socket.removeprefix("//")
        self._base = "http://slurmrestd" if socket else url.rstrip("/")
        self._version: Version | None = None
        self._parameters: frozenset[str] = frozenset()

    def version(self) -> Version:
        """The newest schema that both sides know, from slurmrestd's own OpenAPI document.

        Raises:
            SourceError: slurmrestd did not answer, or has no schema with jobs.
        """
        if self._version is None:
            try:
                document = self._get("/openapi/v3", _DOCUMENT)
            except SourceError as error:
                if "404" not in str(error):
                    raise
                document = self._get("/openapi", _DOCUMENT)
            paths = object_of(document.get("paths"))
            found = {tuple(map(int, match.groups())) for path in paths if (match := _JOBS_PATH.match(path))}
            spoken = sorted(version for version in found if len(version) == 3)
            if not spoken:
                raise SourceError(
                    f"{self.name}: {self.url}: no /slurm/vX.Y.Z/jobs in its OpenAPI document: start slurmrestd with "
                    "the openapi plugins (-s)"
                )
            known = [version for version in spoken if version <= _NEWEST]
            self._version = known[-1] if known else spoken[0]
            asked = object_of(object_of(paths.get(f"/slurmdb/{_text(self._version)}/jobs")).get("get"))
            told = list_of(asked.get("parameters"))
            self._parameters = frozenset(str(one.get("name")) for one in told if isinstance(one, dict))
        if self._version > _NEWEST:
            self.warnings.append(f"{self.name}: slurmrestd speaks {_text(self._version)} at least: not tried yet")
        return self._version

    def about(self) -> str:
        """The schema that is spoken.

        Raises:
            SourceError: As for `version`.
        """
        return f"slurmrestd {_text(self.version())}"

    def history(self, start: datetime, end: datetime) -> pl.DataFrame:
        """Columns of `raw_jobs`: what the accounting knows of [start, end), every attempt.

        Raises:
            SourceError: slurmrestd did not answer, or not whole.
        """
        path = f"/slurmdb/{_text(self.version())}/jobs"
        query = {"start_time": f"uts{int(start.timestamp())}", "end_time": f"uts{int(end.timestamp()) + 1}"}
        if "show_duplicates" in self._parameters:
            query["show_duplicates"] = "true"
        at = datetime.now(UTC)
        jobs = self._jobs(self._get(path, _HISTORY, query))
        return self._frame([fields for job in jobs for fields in (accounted_fields(job), *step_fields(job))], at, start)

    def queue(self) -> pl.DataFrame:
        """Columns of `raw_jobs` and `priority`: every job that the controller remembers.

        Raises:
            SourceError: slurmrestd did not answer, or not whole.
        """
        path = f"/slurm/{_text(self.version())}/jobs"
        document, at = self._ask(path, _QUEUE)
        jobs = self._jobs(document)
        frame = self._frame([queued_fields(job) for job in jobs], at, None)
        return with_priorities(frame, [(word(job.get("job_id")), word(job.get("priority"))) for job in jobs])

    def nodes(self) -> pl.DataFrame:
        """Columns of `NODES_SCHEMA`; racks are told by newer schemas alone.

        Raises:
            SourceError: slurmrestd did not answer, or not whole.
        """
        document = self._get(f"/slurm/{_text(self.version())}/nodes", _NODES)
        rows = [
            node_row(node_fields(node), {})
            for node in list_of(document.get("nodes"))
            if isinstance(node, dict) and word(node.get("name")).strip()
        ]
        return pl.DataFrame(rows, schema=NODES_SCHEMA, orient="row")

    def _frame(self, rows: list[dict[str, str]], at: datetime, since: datetime | None) -> pl.DataFrame:
        texts = [[row.get(column, "") for column in _COLUMNS] for row in rows]
        jobs, warnings = jobs_frame(_COLUMNS, texts, self.name, at, since=since)
        self.warnings += warnings
        return jobs

    def _jobs(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        jobs = document.get("jobs")
        if not isinstance(jobs, list):
            raise SourceError(f"{self.name}: {self.url}: an answer without jobs: {sorted(document)[:5]}")
        return [job for job in jobs if isinstance(job, dict)]

    def _get(self, path: str, price: Price, query: dict[str, str] | None = None) -> dict[str, Any]:
        return self._ask(path, price, query)[0]

    def _ask(self, path: str, price: Price, query: dict[str, str] | None = None) -> tuple[dict[str, Any], datetime]:
        if self.budget is None:
            at = datetime.now(UTC)
            document = self._decoded(path, self._send(path, query))
        else:
            answer = self.budget.ask(f"{self.url}{path}", price, lambda: self._whole(path, query))
            document, at = self._decoded(path, answer.data), answer.at
        self.warnings += [f"{self.name}: slurmrestd: {_said([one])}" for one in list_of(document.get("warnings"))]
        return document, at

    def _whole(self, path: str, query: dict[str, str] | None) -> bytes:
        """An answer that may be kept for others: one that says of no error."""
        data = self._send(path, query)
        self._decoded(path, data)
        return data

    def _decoded(self, path: str, data: bytes) -> dict[str, Any]:
        try:
            # Names of jobs may be of any encoding.
            document = msgspec.json.decode(data.decode("utf-8", "replace"))
        except (msgspec.DecodeError, RecursionError) as error:
            raise SourceError(f"{self.name}: {self.url}{path}: no JSON: {error}: {data[:80]!r}") from error
        if not isinstance(document, dict):
            raise SourceError(f"{self.name}: {self.url}{path}: no JSON object")
        if errors := document.get("errors"):
            raise SourceError(f"{self.name}: {self.url}{path}: {_said(errors)}")
        return document

    def _send(self, path: str, query: dict[str, str] | None) -> bytes:
        headers = {"X-SLURM-USER-NAME": self._user}
        if self._token_file:
            try:
                token = Path(self._token_file).read_text(encoding="utf-8").strip().removeprefix("SLURM_JWT=")
            except (OSError, UnicodeDecodeError) as error:
                raise SourceError(f"{self.name}: slurm_rest_token_file {self._token_file}: {error}") from None
            headers["X-SLURM-USER-TOKEN"] = token
        elif self.url.startswith("unix:"):
            headers = {}  # the socket knows its user
        try:
            # One connection a request: slurmrestd closes it, and a source has nothing to close then.
            # Certificates are loaded only where they are looked at: it takes longer than the request.
            transport = httpx.HTTPTransport(uds=self._socket or None, verify=self._base.startswith("https:"))
            with (
                httpx.Client(transport=transport, timeout=self.timeout_s, trust_env=False) as client,
                client.stream("GET", self._base + path, params=query, headers=headers) as answer,
            ):
                content = self._read(answer, path)
        except httpx.TimeoutException:
            raise SourceError(
                f"{self.name}: {self.url}: no answer within {self.timeout_s:g} s (slurm_timeout_s)"
            ) from None
        except (httpx.HTTPError, ValueError) as error:
            raise SourceError(f"{self.name}: {self.url}: cannot be reached: {error}") from None
        if answer.status_code in (401, 403):
            raise SourceError(
                f"{self.name}: {self.url}: slurmrestd refused user {self._user!r} ({answer.status_code}): is the token "
                "in slurm_rest_token_file new enough (scontrol token), and made for slurm_rest_user?"
            )
        if answer.status_code >= 400 and b'"errors"' not in content:
            said = content[:200].decode("utf-8", "replace")
            raise SourceError(f"{self.name}: {self.url}{path}: HTTP {answer.status_code}: {said!r}")
        return content

    def _read(self, answer: httpx.Response, path: str) -> bytes:
        """The whole body, in bounded time and memory."""
        deadline_s, parts, size = time.monotonic() + self.timeout_s, [], 0
        for part in answer.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > _MAX_ANSWER_BYTES:
                raise SourceError(f"{self.name}: {self.url}{path}: more than {_MAX_ANSWER_BYTES / 2**20:g} MiB")
            if time.monotonic() > deadline_s:
                raise httpx.ReadTimeout("the answer did not end in time")
        return b"".join(parts)


def _text(version: Version) -> str:
    return "v" + ".".join(map(str, version))


def _said(errors: Any) -> str:
    rows = errors if isinstance(errors, list) else [errors]
    words = [
        " ".join(str(row[key]) for key in ("source", "error", "description") if row.get(key))
        if isinstance(row, dict)
        else str(row)
        for row in rows
    ]
    return "; ".join(dict.fromkeys(words))[:400]
