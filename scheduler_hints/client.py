"""A small client of the hints API that never makes an outage of the API an outage of its caller.

It keeps the last good answer of each query until that answer expires, counted on a clock that no wall-clock step moves
and that runs on through suspend. When there is nothing to believe it says so (`is_fresh` false, no items) instead of
raising: a scheduler then goes on exactly as without hints. Only misuse raises: a wrong parameter, a refused token.

HintsError
├── HintsAuthError      401, 403: the token is unknown, or may not see this
└── HintsUsageError     other 4xx: the request itself is wrong; the API's message says how
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import httpx
import msgspec

from scheduler_hints.schema import KINDS, ErrorBody
from scheduler_hints.snapshot import boottime_s

MAX_CACHED = 256
MAX_ANSWER_BYTES = 256 * 2**20
_RETRY_STATUSES = frozenset({408, 425, 429})


class HintsError(Exception):
    """The API refused a request for a reason that will not pass by itself.

    Attributes:
        status: HTTP status.
        code: The API's short name of the error.
        detail: The API's facts about it, or None.
    """

    def __init__(self, status: int, code: str, message: str, detail: Any = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.detail = detail


class HintsAuthError(HintsError):
    """The token is unknown, or may not see what was asked for."""


class HintsUsageError(HintsError):
    """The request is wrong."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API said, or that nothing can be believed.

    Attributes:
        is_fresh: The answer may be acted on. When false, `items` is empty.
        items: Hints as dicts, field names as in `schema.py`.
        facts: The rest of the answer: version, generated_at, stale_shards, model_versions, …
        deadline_s: When it expires, on the client's clock, s (`HintsClient.expires_in_s`). What the API does not limit
            (status, an unknown job) holds for the moment it was asked.
        problem: Why the API could not be asked this time, in words; an answer that is fresh all the same was kept.
    """

    is_fresh: bool
    items: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    deadline_s: float = 0.0
    problem: str | None = None

    @property
    def version(self) -> int | None:
        return self.facts.get("version")

    @property
    def stale_shards(self) -> list[str]:
        return self.facts.get("stale_shards", [])


@dataclass(slots=True)
class _Kept:
    etag: str
    answer: Answer


class HintsClient:
    """Asks one hints API. Safe to share between threads; use it as a context manager or call `close`.

    Args:
        url: Base URL, as `http://127.0.0.1:8700`.
        token: Secret of a token, where the API wants one.
        timeout_s: Longest time one call may take, about; a scheduler should not wait long for a hint.
        verify: Verification of TLS certificates, as httpx takes it.
        clock: Clock that expiry is counted on, s; the tests give another.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout_s: float = 2.0,
        *,
        verify: Any = True,
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        headers = {"accept": "application/json"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        # The environment's proxies are not for a scheduler's own control plane.
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=httpx.Timeout(timeout_s), verify=verify, trust_env=False
        )
        self.timeout_s = timeout_s
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> HintsClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, kind: str, **parameters: Any) -> Answer:
        """Hints of one kind.

        Args:
            kind: `bottlenecks`, `backfill-windows`, `node-risks`, `jobs`, `reservation-plans` or `demand`.
            parameters: Query parameters of that route; None leaves one out. `class` is given as `class_`. With `wait`
                (s) the call takes up to so much longer when nothing has changed since the last one.

        Returns:
            The answer; never an expired one.

        Raises:
            HintsError: The request was refused as wrong, or the token was.
            ValueError: There is no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"no kind {kind!r}; kinds: {', '.join(KINDS)}")
        query = {name.rstrip("_"): str(value) for name, value in sorted(parameters.items()) if value is not None}
        wait_s = _seconds(query.get("wait"))
        target = str(httpx.URL(f"/v1/{kind}", params=query))
        # What is kept is the same whether or not a call would have waited for it.
        kept_as = str(httpx.URL(f"/v1/{kind}", params={k: v for k, v in query.items() if k != "wait"}))
        return self._ask(target, kept_as=kept_as, wait_s=wait_s)

    def bottlenecks(self, **parameters: Any) -> Answer:
        return self.get("bottlenecks", **parameters)

    def backfill_windows(self, **parameters: Any) -> Answer:
        return self.get("backfill-windows", **parameters)

    def node_risks(self, **parameters: Any) -> Answer:
        return self.get("node-risks", **parameters)

    def jobs(self, **parameters: Any) -> Answer:
        return self.get("jobs", **parameters)

    def reservation_plans(self, **parameters: Any) -> Answer:
        return self.get("reservation-plans", **parameters)

    def demand(self, **parameters: Any) -> Answer:
        return self.get("demand", **parameters)

    def job(self, cluster: str, job_id: str) -> Answer:
        """The forecast of one job: one item, or a fresh answer without items when the API knows no such job.

        Raises:
            HintsError: The token was refused.
        """
        path = f"/v1/jobs/{_quote(cluster)}/{_quote(job_id)}"
        try:
            return self._ask(path)
        except HintsUsageError as error:
            if error.code != "unknown_job":
                raise
            return Answer(is_fresh=True, deadline_s=self._clock(), problem=str(error))

    def status(self) -> Answer:
        """Freshness of everything, in `facts`; not fresh when the API cannot be asked."""
        return self._ask("/v1/status", keeps=False)

    def runtime_forecasts(self, cluster: str, jobs: Sequence[dict[str, Any]]) -> Answer:
        """Runtimes of jobs that are not submitted yet, in the order given: quantiles, and the most likely.

        `facts` say what they rest on: `model_version`, `rests_on`, `ended_jobs`, `note` (null, or what to know before
        believing them), `data_age_s`. The answer may be used until `deadline_s`.

        Args:
            cluster: Cluster they would run on.
            jobs: What is known of each; 1 to 1,000.

        Raises:
            HintsError: A job has a wrong field, or the token was refused.
        """
        body = msgspec.json.encode({"cluster": cluster, "jobs": list(jobs)})
        return self._ask("/v1/runtime-forecasts", keeps=False, body=body)

    def send_progress(self, cluster: str, rows: Sequence[dict[str, Any]]) -> Answer:
        """Tell how far jobs are; `facts` then say how many rows were `kept`.

        Rows without `ts` get the present time here, so that a row that had to be sent twice is kept once.

        Args:
            cluster: Cluster that they run on.
            rows: `job_id` and one or more of `step`, `max_steps`, `step_time_s`, `communication_time_s`, `loss`,
                `phase`; perhaps `rank`. 1 to 1,000.

        Returns:
            Not fresh when the API cannot be asked: nothing is kept then, and training goes on.

        Raises:
            HintsError: A row has a wrong field, or the token may not send.
        """
        now = datetime.now(UTC)
        body = msgspec.json.encode({"cluster": cluster, "rows": [{"ts": now} | dict(row) for row in rows]})
        return self._ask("/v1/progress", keeps=False, body=body)

    def send_placements(self, cluster: str, placements: Sequence[dict[str, Any]]) -> Answer:
        """Tell what was just placed: `job_id` and `nodes` of each, 1 to 1,000; windows are without it for 90 s.

        Returns:
            Not fresh when the API cannot be asked: placing goes on, windows are a tick late.

        Raises:
            HintsError: A placement has a wrong field, or the token may not send.
        """
        body = msgspec.json.encode({"cluster": cluster, "placements": list(placements)})
        return self._ask("/v1/placements", keeps=False, body=body)

    def expires_in_s(self, answer: Answer) -> float:
        """Seconds for which an answer may still be acted on; 0 when it may not."""
        return max(0.0, answer.deadline_s - self._clock()) if answer.is_fresh else 0.0

    def _ask(
        self,
        target: str,
        *,
        keeps: bool = True,
        body: bytes | None = None,
        kept_as: str | None = None,
        wait_s: float = 0.0,
    ) -> Answer:
        name = kept_as or target
        with self._lock:
            kept = self._kept.get(name) if keeps else None
        headers: dict[str, str] = {}
        if kept is not None and self._clock() < kept.answer.deadline_s:
            headers["if-none-match"] = kept.etag
        if body is not None:
            headers["content-type"] = "application/json"
        asked_s = self._clock()  # an answer's life is counted from before the question: never too long
        try:
            response, content = self._exchange(target, headers, body, self.timeout_s + wait_s)
            answer = self._read(response, content, kept, asked_s)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, _OutageError) as error:
            return self._last_good(
                kept, f"{str(self._http.base_url).rstrip('/')}{target}: {error or type(error).__name__}"
            )
        if keeps and (etag := response.headers.get("etag")):
            self._keep(name, _Kept(etag, answer))
        return answer

    def _exchange(
        self, target: str, headers: dict[str, str], body: bytes | None, most_s: float
    ) -> tuple[httpx.Response, bytes]:
        """One request, and once more when an idle connection had been closed by the server meanwhile."""
        try:
            return self._send(target, headers, body, most_s)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            return self._send(target, headers, body, most_s)

    def _send(
        self, target: str, headers: dict[str, str], body: bytes | None, most_s: float
    ) -> tuple[httpx.Response, bytes]:
        until = time.monotonic() + most_s
        timeout = httpx.Timeout(self.timeout_s, read=most_s)
        method = "GET" if body is None else "POST"
        with self._http.stream(method, target, headers=headers, content=body, timeout=timeout) as response:
            parts: list[bytes] = []
            size = 0
            for part in response.iter_bytes():
                size += len(part)
                if size > MAX_ANSWER_BYTES:
                    raise _OutageError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
                if time.monotonic() > until:
                    raise _OutageError(f"the answer took longer than {most_s:g} s")
                parts.append(part)
        return response, b"".join(parts)

    def _read(self, response: httpx.Response, content: bytes, kept: _Kept | None, asked_s: float) -> Answer:
        status = response.status_code
        if status == 304:
            if kept is None:
                raise _OutageError("304 to a question without an ETag")
            deadline_s = asked_s + _number(response.headers.get("x-expires-in"))
            if self._clock() >= deadline_s:
                raise _OutageError("the answer had expired before it came")
            return replace(kept.answer, deadline_s=deadline_s, problem=None)
        if status == 200:
            facts = _decode(content, dict[str, Any])
            items = facts.pop("items", None)
            if items is None:
                items = [facts.pop("item")] if "item" in facts else []
            deadline_s = asked_s + _number(facts.get("expires_in_s", 0.0))
            if "expires_in_s" in facts and self._clock() >= deadline_s:
                raise _OutageError("the answer had expired before it came")
            return Answer(is_fresh=True, items=items, facts=facts, deadline_s=deadline_s)
        if 400 <= status < 500 and status not in _RETRY_STATUSES:
            error = _decode(content, ErrorBody).error
            kind = HintsAuthError if status in (401, 403) else HintsUsageError
            raise kind(status, error.code, error.message, error.detail)
        try:
            message = _decode(content, ErrorBody).error.message
        except _OutageError:
            message = "no reason given"
        raise _OutageError(f"HTTP {status}: {message}")

    def _last_good(self, kept: _Kept | None, problem: str) -> Answer:
        if kept is not None and self._clock() < kept.answer.deadline_s:
            return replace(kept.answer, problem=problem)
        return Answer(is_fresh=False, problem=problem)

    def _keep(self, target: str, kept: _Kept) -> None:
        with self._lock:
            if target not in self._kept and len(self._kept) >= MAX_CACHED:
                now_s = self._clock()
                living = {key: value for key, value in self._kept.items() if value.answer.deadline_s > now_s}
                self._kept = living if len(living) < MAX_CACHED else {}
            self._kept[target] = kept


class _OutageError(Exception):
    """The API answered, but not with something that can be used; handled like an outage."""


def _quote(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


def _seconds(text: str | None) -> float:
    """How long a call asks to wait; what is no number the API refuses."""
    try:
        return min(max(0.0, float(text or 0)), 60.0)
    except ValueError:
        return 0.0


def _number(value: Any) -> float:
    try:
        return max(0.0, float(value))
    except (TypeError, ValueError):
        raise _OutageError(f"expiry {value!r} is not a number") from None


def _decode(content: bytes, shape: Any) -> Any:
    try:
        return msgspec.json.decode(content, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _OutageError(f"the answer is not what this API says: {error}") from None
