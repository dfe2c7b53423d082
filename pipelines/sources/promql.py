"""Queries to a Prometheus HTTP API through prometheus-api-client, with a session of our own.

The session moves parameters into the body of a POST (long queries do not fit a URL), bounds the whole answer in time,
keeps the server's warnings, explains every failure, and decodes a matrix straight into arrays: series labels stay raw
bytes, sample values of all series are parsed in one go. Only `custom_query` of the client is used: its frames lose
precision and overwrite labels. What to ask stands in `prometheus.py`.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from http.client import RemoteDisconnected
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import msgspec
import numpy as np
import polars as pl
import requests
from prometheus_api_client import PrometheusConnect
from urllib3.exceptions import HTTPError as TransportError
from urllib3.util.retry import Retry

from pipelines.sources import SourceError

_CONNECT_TIMEOUT_S = 5
_CHUNK = 1 << 20
_MAX_ANSWER_BYTES = 1 << 30  # after decompression
_LOOPBACK = ("127.", "localhost", "[::1]")


class TooManySamplesError(SourceError):
    """The server refused a query as too large: a shorter range may pass."""


class Matrix(NamedTuple):
    """Answer to a range selector.

    Attributes:
        labels: Labels of each series, as JSON bytes.
        counts: Number of samples of each series.
        ts_ms: Times of the samples, ms since the epoch, series after series.
        values: Values of the samples.
    """

    labels: list[bytes]
    counts: np.ndarray
    ts_ms: np.ndarray
    values: np.ndarray


class _Series(msgspec.Struct):
    metric: msgspec.Raw
    values: msgspec.Raw = msgspec.Raw(b"")  # absent for native histograms


class _Data(msgspec.Struct):
    resultType: str  # noqa: N815
    result: msgspec.Raw


class _Answer(msgspec.Struct):
    status: str
    data: _Data | None = None
    errorType: str = ""  # noqa: N815
    error: str = ""
    warnings: list[str] | None = None
    infos: list[str] | None = None


_ANSWER = msgspec.json.Decoder(_Answer)
_MATRIX = msgspec.json.Decoder(list[_Series])
_LABELS = msgspec.json.Decoder(dict[str, str])
_PAIRS = msgspec.json.Decoder(list[tuple[float, str]])


def decode_matrix(raw: bytes | msgspec.Raw) -> Matrix:
    """A matrix result as arrays.

    Raises:
        ValueError: It is none.
    """
    series = [s for s in _MATRIX.decode(raw) if len(memoryview(s.values)) > 2]
    labels = [bytes(s.metric) for s in series]
    texts = [bytes(s.values) for s in series]
    counts = np.fromiter((text.count(b"],[") + 1 for text in texts), np.int64, len(texts))
    flat = b"\n".join(texts).replace(b"],[", b"\n").translate(None, b'[]"')
    del texts
    try:
        frame = pl.read_csv(
            io.BytesIO(flat), has_header=False, schema={"ts": pl.Float64, "value": pl.Float64}, null_values=[]
        )
        if len(frame) != counts.sum() or frame["ts"].null_count() or frame["value"].null_count():
            raise ValueError("samples and series do not add up")
    except (pl.exceptions.PolarsError, ValueError):
        return _decode_slowly(series, labels)
    return Matrix(labels, counts, _milliseconds(frame["ts"].to_numpy()), frame["value"].to_numpy())


def _decode_slowly(series: list[_Series], labels: list[bytes]) -> Matrix:
    """For servers that put blanks into their JSON."""
    pairs = [_PAIRS.decode(s.values) for s in series]
    ts = np.array([ts for rows in pairs for ts, _ in rows], np.float64)
    values = np.array([float(text) for rows in pairs for _, text in rows], np.float64)
    return Matrix(labels, np.array([len(rows) for rows in pairs], np.int64), _milliseconds(ts), values)


def _milliseconds(seconds: np.ndarray) -> np.ndarray:
    # Times that no integer holds stay absurd, for the source to leave them out.
    return np.rint(np.clip(np.nan_to_num(seconds, nan=-9e15), -9e15, 9e15) * 1000).astype(np.int64)


class _Response:
    """What the client library asks of a response."""

    status_code = 200
    ok = True

    def __init__(self, result: Any) -> None:
        self._result = result

    def json(self) -> dict[str, Any]:
        return {"status": "success", "data": {"result": self._result}}


class _Session(requests.Session):
    def __init__(self, source: str, url: str, timeout_s: float) -> None:
        super().__init__()
        self.source, self.timeout_s = source, timeout_s
        self.shown_url = _without_password(url)
        self.notes: list[str] = []
        if urlsplit(url).netloc.rsplit("@", 1)[-1].startswith(_LOOPBACK):
            self.headers["Accept-Encoding"] = "identity"  # nothing to save, and compressing costs the server

    def request(self, method: Any, url: Any, params: Any = None, **kwargs: Any) -> Any:  # ty: ignore[incompatible-method-override]
        kwargs["timeout"] = (_CONNECT_TIMEOUT_S, self.timeout_s)
        deadline = time.monotonic() + self.timeout_s
        form = {"timeout": f"{self.timeout_s:g}s", **(params or {})}
        kwargs |= {"data": form, "stream": True, "allow_redirects": False}
        try:
            try:
                response = super().request(method, url, **kwargs)
            except requests.ConnectionError as error:
                if not _was_idle(error):
                    raise
                response = super().request(method, url, **kwargs)
            with response:
                return self._answer(response, self._read(response, deadline))
        except (requests.RequestException, TransportError, OSError) as error:
            raise SourceError(self._explain(error)) from error

    def _read(self, response: requests.Response, deadline: float) -> bytes:
        parts, size = [], 0
        for part in response.iter_content(_CHUNK):
            parts.append(part)
            size += len(part)
            if size > _MAX_ANSWER_BYTES:
                raise SourceError(
                    f"{self.source}: Prometheus at {self.shown_url} sent more than {_MAX_ANSWER_BYTES / 2**20:g} MiB: "
                    "narrow prometheus_matcher to this cluster"
                )
            if time.monotonic() > deadline:
                raise requests.Timeout("the answer did not end in time")
        return b"".join(parts)

    def _answer(self, response: requests.Response, body: bytes) -> _Response:
        status = response.status_code
        try:
            answer = _ANSWER.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise SourceError(self._odd(status, response.headers.get("Content-Type", ""), body, error)) from error
        if status != 200 or answer.status != "success" or answer.data is None:
            text = answer.error or f"HTTP status {status}"
            kind = TooManySamplesError if "too many samples" in text or "maximum resolution" in text else SourceError
            raise kind(f"{self.source}: Prometheus at {self.shown_url} refused the query: {text}")
        self.notes += [*(answer.warnings or []), *(answer.infos or [])]
        try:
            if answer.data.resultType == "matrix":
                return _Response(decode_matrix(answer.data.result))
            return _Response(msgspec.json.decode(answer.data.result))
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
            raise SourceError(
                f"{self.source}: Prometheus at {self.shown_url} sent a result that cannot be read: {error}"
            ) from error

    def _odd(self, status: int, content_type: str, body: bytes, error: Exception) -> str:
        where = f"{self.source}: {self.shown_url}"
        if status in (401, 403):
            return f"{where} refused access (HTTP {status}): put user:password@ into prometheus_url, or allow this host"
        if 300 <= status < 400:
            return f"{where} redirects (HTTP {status}), to a login page perhaps: give the address of the API itself"
        if status in (404, 405):
            return f"{where} has no Prometheus API (HTTP {status}): prometheus_url is the part before /api/v1"
        if status >= 500:
            return f"{where} failed (HTTP {status}): {_snippet(body)}; look into the server's log"
        if "html" in content_type or body[:1] == b"<":
            return f"{where} answered HTML, not JSON: a proxy or login page stands before it, or the address is wrong"
        return f"{where} sent no whole JSON answer (HTTP {status}, {len(body)} bytes): {error}: {_snippet(body)}"

    def _explain(self, error: Exception) -> str:
        where = f"{self.source}: Prometheus at {self.shown_url}"
        if isinstance(error, requests.exceptions.SSLError):
            return f"{where}: TLS failed: {error}; set REQUESTS_CA_BUNDLE to the certificate authority's file"
        if isinstance(error, requests.ConnectTimeout):
            return f"{where} cannot be reached within {_CONNECT_TIMEOUT_S} s: check prometheus_url and the network"
        if isinstance(error, requests.Timeout) or "timed out" in str(error).lower():
            return f"{where} did not answer within {self.timeout_s:g} s: raise prometheus_timeout_s or look at its load"
        if isinstance(error, (requests.exceptions.ChunkedEncodingError, requests.exceptions.ContentDecodingError)):
            return f"{where} broke off in the middle of its answer: {error}"
        if isinstance(error, requests.exceptions.InvalidURL | requests.exceptions.MissingSchema):
            return f"{where}: no valid URL: {error}"
        return f"{where} cannot be reached: {_root(error)}: is it running, and is prometheus_url right?"


def _was_idle(error: BaseException) -> bool:
    """The server had closed a kept connection, as it does with idle ones, just when it was used again."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, (RemoteDisconnected, ConnectionResetError, BrokenPipeError)):
            return True
        inner = inner.__cause__ or inner.__context__
    return False


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


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[-1]))


class PromQL:
    """A Prometheus-compatible server.

    Args:
        source: Name for messages.
        url: Base URL, with user:password@ when it wants them.
        timeout_s: Longest wait for one answer, s.
    """

    def __init__(self, source: str, url: str, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._session = _Session(source, self.url, timeout_s)
        # A query that timed out is not asked again at once: the server may be at its limit.
        retry = Retry(
            connect=1, read=False, status=2, other=0, backoff_factor=0.2, allowed_methods=None,
            status_forcelist=(502, 503, 504), raise_on_status=False,
        )  # fmt: skip
        self._client = PrometheusConnect(self.url, method="POST", session=self._session, retry=retry)

    def matrix(self, query: str, at_ms: int | None = None) -> Matrix:
        """Samples that a range selector gives.

        Args:
            query: As `up[60s]`.
            at_ms: Time of evaluation, ms since the epoch; None: the server's own now.

        Raises:
            SourceError: No whole answer came.
        """
        result = self._client.custom_query(query, {} if at_ms is None else {"time": f"{at_ms / 1000:.3f}"})
        if isinstance(result, Matrix):
            return result
        raise SourceError(
            f"{self._session.source}: Prometheus at {self._session.shown_url} gave no matrix to {query!r}"
        )

    def vector(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        """Labels and value of each series of an instant query at the server's now; a scalar has no labels.

        Raises:
            SourceError: No whole answer came.
        """
        result = self._client.custom_query(query)
        try:
            if len(result) == 2 and isinstance(result[1], str):
                return [({}, float(result[1]))]
            return [(msgspec.convert(row["metric"], dict[str, str]), float(row["value"][1])) for row in result]
        except (TypeError, KeyError, ValueError, IndexError, msgspec.ValidationError) as error:
            raise SourceError(f"{self._session.source}: {query!r} gave no vector: {error!r}") from error

    def scalar(self, query: str) -> float:
        """Value of a scalar query.

        Raises:
            SourceError: No whole answer came.
        """
        rows = self.vector(query)
        if len(rows) != 1:
            raise SourceError(
                f"{self._session.source}: Prometheus at {self._session.shown_url} gave no scalar to {query!r}"
            )
        return rows[0][1]

    def take_warnings(self) -> list[str]:
        """Warnings of the server since the last call, each once."""
        notes, self._session.notes = list(dict.fromkeys(self._session.notes)), []
        return notes

    def close(self) -> None:
        self._session.close()


def parse_labels(raw: bytes) -> dict[str, str]:
    """Labels of a series of a `Matrix`.

    Raises:
        ValueError: They are no object of texts.
    """
    try:
        return _LABELS.decode(raw)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
