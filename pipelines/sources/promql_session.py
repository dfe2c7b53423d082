"""The session that prometheus-api-client is given: one question to a Prometheus API, answered whole or explained.

Parameters move into the body of a POST (long queries do not fit a URL). A question ends within its time-out, retries
included: what a restart, a proxy or a limit of the server turns away is asked again a few times, later each time; what
was too slow is not. The server's warnings are kept. Who we are: `promql_access.py`; matrices: `promql_matrix.py`.
"""

from __future__ import annotations

import math
import random
import re
import time
from http.client import RemoteDisconnected
from typing import Any

import msgspec
import requests
from urllib3.exceptions import HTTPError as TransportError
from urllib3.exceptions import InvalidHeader, ProtocolError
from urllib3.util.retry import Retry

from pipelines.sources import SourceError
from pipelines.sources.promql_access import Access, explain_files, explain_tls, hung_up
from pipelines.sources.promql_matrix import ANSWER, Answer, decode_matrix, spoil_half_pairs

_CONNECT_TIMEOUT_S = 5
_CHUNK = 1 << 20
_MAX_ANSWER_BYTES = 1 << 30  # after decompression
_LOOPBACK = ("127.", "localhost", "[::1]")
_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.25
_AGAIN = (429, 502, 503, 504)

# Limits as Prometheus, VictoriaMetrics, Thanos, Mimir and Cortex word them. Of the first kind a shorter range is rid,
# of the second only fewer series.
_TOO_MANY_SAMPLES = re.compile(
    r"too many samples|maximum resolution|maxSamplesPer|maxMemoryPerQuery|samples limit|number of samples|"
    r"chunks limit|number of chunks|chunk bytes|chunks-per-query|chunk-bytes|query length|time range exceeds|"
    r"bytes limit|response (?:size|is) too|ResourceExhausted|larger than max",
    re.IGNORECASE,
)
_TOO_MANY_SERIES = re.compile(
    r"matching (?:time ?series|metrics) exceeds|maxUniqueTimeseries|maxSeries|too many series|series limit|number of "
    r"series|series-per-query|maxQueryLen|too long query|too many (?:tag|label)",
    re.IGNORECASE,
)
_TOO_OLD = re.compile(r"denyQueriesOutsideRetention|outside (?:of )?the (?:allowed|configured) .?retention", re.I)


class TooManySamplesError(SourceError):
    """The server refused a query as too large: a shorter range may pass."""


class TooManySeriesError(SourceError):
    """The server refused a query as too wide: fewer metric names may pass, a shorter range will not."""


class OutsideRetentionError(SourceError):
    """The server refuses what is older than it keeps."""


class _AgainError(Exception):
    """Worth another try: what to raise when there is none, and how long the server asks to be left alone."""

    def __init__(self, error: SourceError, pause_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error, self.pause_s = error, pause_s


class _Response:
    """What the client library asks of a response."""

    status_code = 200
    ok = True

    def __init__(self, result: Any) -> None:
        self._result = result

    def json(self) -> dict[str, Any]:
        return {"status": "success", "data": {"result": self._result}}


class QuerySession(requests.Session):
    """Asks one server.

    Args:
        source: Name for messages.
        url: Base URL, without a password.
        timeout_s: Longest time from question to answer, retries included, s.
        access: Who we are and whom we trust.

    Attributes:
        notes: Warnings that answers carried; whoever reads them empties the list.
    """

    def __init__(self, source: str, url: str, timeout_s: float, access: Access) -> None:
        super().__init__()
        self.source, self.timeout_s, self.shown_url = source, timeout_s, url
        self.notes: list[str] = []
        self._access = access
        if url.partition("://")[2].startswith(_LOOPBACK):
            self.headers["Accept-Encoding"] = "identity"  # nothing to save, and compressing costs the server
        access.apply(self, source)

    def request(self, method: Any, url: Any, params: Any = None, **kwargs: Any) -> Any:  # ty: ignore[incompatible-method-override]
        """Ask until there is an answer or no time; the client library calls it.

        Raises:
            SourceError: No whole answer came. The message names the source and says what to do.
        """
        deadline = time.monotonic() + self.timeout_s
        pause_s = _FIRST_PAUSE_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._once(method, url, dict(params or {}), kwargs, deadline)
            except _AgainError as again:
                wait_s = max(pause_s * random.uniform(0.7, 1.3), again.pause_s)
                if attempt == _ATTEMPTS or time.monotonic() + wait_s >= deadline:
                    raise again.error from again.__cause__
                time.sleep(wait_s)
                pause_s *= 2
        raise AssertionError("every attempt returns or raises")

    def _once(
        self, method: Any, url: Any, params: dict[str, str], kwargs: dict[str, Any], deadline: float
    ) -> _Response:
        left_s = max(deadline - time.monotonic(), 0.05)
        # Against the environment, which would take the place of a session's own certificates.
        more: dict[str, Any] = {
            "data": {"timeout": f"{math.ceil(left_s)}s", **params},
            "timeout": (min(_CONNECT_TIMEOUT_S, left_s), left_s),
            "stream": True,
            "allow_redirects": False,
            "verify": self.verify,
            "cert": self.cert,
            "auth": self.auth,
        }
        try:
            self._access.check_files(self.source)
            with super().request(method, url, **{**kwargs, **more}) as response:
                return self._answer(response, self._read(response, deadline))
        except (requests.RequestException, TransportError, OSError, ValueError) as error:
            found = SourceError(self._explain(error))
            if _is_passing(error):
                raise _AgainError(found) from error
            raise found from error

    def _read(self, response: requests.Response, deadline: float) -> bytes:
        parts, size = [], 0
        for part in response.iter_content(_CHUNK):
            parts.append(part)
            size += len(part)
            if size > _MAX_ANSWER_BYTES:
                raise TooManySamplesError(
                    f"{self.source}: Prometheus at {self.shown_url} sent more than {_MAX_ANSWER_BYTES / 2**20:g} MiB: "
                    "narrow prometheus_matcher to this cluster"
                )
            if time.monotonic() > deadline:
                raise requests.Timeout("the answer did not end in time")
        return b"".join(parts)

    def _answer(self, response: requests.Response, body: bytes) -> _Response:
        status = response.status_code
        try:
            try:
                answer = ANSWER.decode(body)
            except msgspec.DecodeError:
                body = spoil_half_pairs(body)
                answer = ANSWER.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            # VictoriaMetrics streams ranges: what stopped it stands behind the part that was sent.
            tail = body[-4096:].decode("utf-8", "replace")
            is_limit = status == 200 and _TOO_MANY_SAMPLES.search(tail)
            found = (TooManySamplesError if is_limit else SourceError)(
                self._odd(status, response.headers.get("Content-Type", ""), body, error)
            )
            raise (_AgainError(found, _asked_pause_s(response)) if status in _AGAIN else found) from error
        if status != 200 or answer.status != "success" or answer.data is None:
            raise self._refusal(response, answer)
        self.notes += [*(answer.warnings or []), *(answer.infos or [])]
        try:
            if answer.data.resultType == "matrix":
                return _Response(decode_matrix(answer.data.result))
            return _Response(msgspec.json.decode(answer.data.result))
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
            raise SourceError(
                f"{self.source}: Prometheus at {self.shown_url} sent a result that cannot be read: {error}"
            ) from error

    def _refusal(self, response: requests.Response, answer: Answer) -> Exception:
        """The error for an answer in which the server itself says no."""
        status, text = response.status_code, answer.error or f"HTTP status {response.status_code}"
        where = f"{self.source}: Prometheus at {self.shown_url}"
        if status in (401, 403):
            return SourceError(f"{where} refused access (HTTP {status}, {text}) to {self._access.in_words()}")
        if _TOO_OLD.search(text):
            return OutsideRetentionError(f"{where} keeps nothing so old: {text}")
        if _TOO_MANY_SERIES.search(text):
            return TooManySeriesError(f"{where} refused the query: {text}")
        if _TOO_MANY_SAMPLES.search(text):
            return TooManySamplesError(f"{where} refused the query: {text}")
        if answer.errorType == "timeout":
            return TooManySamplesError(
                f"{where} gave up the query: {text}: raise its query time-out or look at its load"
            )
        if status in _AGAIN:
            hint = ": it limits how often it may be asked; lower prometheus_parallel" if status == 429 else ""
            return _AgainError(
                SourceError(f"{where} is not ready (HTTP {status}): {text}{hint}"), _asked_pause_s(response)
            )
        if "parse error" in text or answer.errorType == "bad_data":
            text += '; is prometheus_matcher written as PromQL has it, as cluster="a"?'
        return SourceError(f"{where} refused the query: {text}")

    def _odd(self, status: int, content_type: str, body: bytes, error: Exception) -> str:
        where = f"{self.source}: {self.shown_url}"
        if status in (401, 403):
            return f"{where} refused access (HTTP {status}) to {self._access.in_words()}"
        if 300 <= status < 400:
            return f"{where} redirects (HTTP {status}), to a login page perhaps: give the address of the API itself"
        if status in (404, 405):
            return f"{where} has no Prometheus API (HTTP {status}): prometheus_url is the part before /api/v1"
        if status == 400 and b"HTTPS server" in body:
            return f"{where} speaks TLS: write https:// into prometheus_url"
        if status == 413:
            return f"{where} refuses so long a query (HTTP 413): raise the limit of the proxy before it"
        if status == 429:
            return f"{where} limits how often it may be asked (HTTP 429): lower prometheus_parallel or raise its limit"
        if status >= 500:
            return f"{where} failed (HTTP {status}): {_snippet(body)}; look into the server's log"
        if _TOO_MANY_SAMPLES.search(end := body[-600:].decode("utf-8", "replace")):
            return f"{where} broke off its answer: {end}"
        if "html" in content_type or body[:1] == b"<":
            return f"{where} answered HTML, not JSON: a proxy or login page stands before it, or the address is wrong"
        return f"{where} sent no whole JSON answer (HTTP {status}, {len(body)} bytes): {error}: {_snippet(body)}"

    def _explain(self, error: Exception) -> str:
        where = f"{self.source}: Prometheus at {self.shown_url}"
        if files := explain_files(error, self._access):
            return f"{self.source}: {files}"
        if isinstance(error, requests.exceptions.SSLError):
            return f"{where}: {explain_tls(error, self._access, self.shown_url)}"
        if isinstance(error, requests.ConnectTimeout):
            return f"{where} cannot be reached within {_CONNECT_TIMEOUT_S} s: check prometheus_url and the network"
        if isinstance(error, requests.Timeout) or "timed out" in str(error).lower():
            return f"{where} did not answer within {self.timeout_s:g} s: raise prometheus_timeout_s or look at its load"
        if isinstance(error, (requests.exceptions.ChunkedEncodingError, requests.exceptions.ContentDecodingError)):
            is_plain = self.shown_url.startswith("http:") and "reset" in str(error)
            hint = "; if it speaks TLS, write https:// into prometheus_url" if is_plain else ""
            return f"{where} broke off in the middle of its answer: {error}{hint}"
        if isinstance(error, requests.exceptions.InvalidURL | requests.exceptions.MissingSchema):
            return f"{where}: no valid URL: {error}"
        if isinstance(error, requests.exceptions.InvalidHeader):
            return f"{self.source}: prometheus_headers: {_header_name(error)}names and values must be one line of text"
        if _is_passing(error) and "refused" not in _root(error):
            is_tls = self.shown_url.startswith("https:")
            hint = hung_up(self._access) if is_tls else "if it speaks TLS, write https:// into prometheus_url"
            return f"{where} hung up before an answer ({_root(error)}); {hint}"
        return f"{where} cannot be reached: {_root(error)}: is it running, and is prometheus_url right?"


def _header_name(error: Exception) -> str:
    found = re.search(r"[Hh]eader part \('([\w-]+)'|for \"?'?([\w-]+)'?\"?", str(error))
    return f"{found[1] or found[2]}: " if found else ""


def _asked_pause_s(response: requests.Response) -> float:
    """What the server's Retry-After asks for, s; 0 without one."""
    text = response.headers.get("Retry-After")
    if not text:
        return 0.0
    try:
        return max(Retry().parse_retry_after(text), 0.0)
    except (InvalidHeader, ValueError, OverflowError):
        return 0.0


def _is_passing(error: BaseException) -> bool:
    """The connection broke, as when a kept one was idle too long or the server starts again: ask once more."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, TimeoutError | requests.Timeout):
            return False
        if isinstance(inner, RemoteDisconnected | ConnectionError | ProtocolError):
            return True
        reason = getattr(inner, "reason", None)
        inner = reason if isinstance(reason, BaseException) else inner.__cause__ or inner.__context__
    return isinstance(error, requests.exceptions.ChunkedEncodingError)


def _root(error: BaseException) -> str:
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        following = inner.__cause__ or inner.__context__
        reason = getattr(inner, "reason", None)
        inner = reason if isinstance(reason, BaseException) else following
    return str(error)


def _snippet(body: bytes) -> str:
    return " ".join(body[:200].decode("utf-8", "replace").split()) or "empty"
