"""Queries to a Prometheus HTTP API through prometheus-api-client: matrices, vectors and scalars.

Only `custom_query` of the client is used: its frames lose precision and overwrite labels. The session it is given
stands in `promql_session.py`, who we are in `promql_access.py`, matrices in `promql_matrix.py`. What to ask stands in
`prometheus.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
from prometheus_api_client import PrometheusConnect
from urllib3.util.retry import Retry

from pipelines.sources import SourceError
from pipelines.sources.promql_access import Access, without_password
from pipelines.sources.promql_matrix import Matrix, parse_labels
from pipelines.sources.promql_session import (
    OutsideRetentionError,
    QuerySession,
    TooManySamplesError,
    TooManySeriesError,
)

__all__ = ["Matrix", "OutsideRetentionError", "PromQL", "TooManySamplesError", "TooManySeriesError", "parse_labels"]


# VictoriaMetrics evaluates what is asked of "now" half a minute in the past, unless it is told not to; others do not
# know the word and pass it over.
_NOW = {"nocache": "1"}


class PromQL:
    """A Prometheus-compatible server. One query at a time: parallel ones want one of these each.

    Args:
        source: Name for messages.
        url: Base URL, with user:password@ perhaps.
        timeout_s: Longest wait for one answer, retries included, s.
        access: Who we are and whom we trust.
    """

    def __init__(self, source: str, url: str, timeout_s: float, access: Access | None = None) -> None:
        self.url, username, password = without_password(url.rstrip("/"))
        access = access or Access()
        if username and not (access.username or access.token_file):
            access = replace(access, username=username, password=password)
        self._session = QuerySession(source, self.url, timeout_s, access)
        # The session retries by itself, within its time-out.
        never = Retry(total=0, read=False, redirect=False, raise_on_status=False)
        self._client = PrometheusConnect(self.url, method="POST", session=self._session, retry=never)

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
            f"{self._session.source}: Prometheus at {self._session.shown_url} gave no matrix to {query[:200]!r}"
        )

    def vector(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        """Labels and value of each series of an instant query at the server's now; a scalar has no labels.

        Raises:
            SourceError: No whole answer came.
        """
        result = self._client.custom_query(query, dict(_NOW))
        try:
            if len(result) == 2 and isinstance(result[1], str):
                return [({}, float(result[1]))]
            return [(msgspec.convert(row["metric"], dict[str, str]), float(row["value"][1])) for row in result]
        except (TypeError, KeyError, ValueError, IndexError, msgspec.ValidationError) as error:
            raise SourceError(f"{self._session.source}: {query[:200]!r} gave no vector: {error!r}") from error

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
