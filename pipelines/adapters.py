"""What lower layers are given from higher ones: forecasts on request for the API, the API for the dashboards.

Small classes with the signatures that those layers ask for; putting them in place is `pipelines/compose.py`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pipelines.settings import Settings

log = logging.getLogger(__name__)

_HISTORY_DAYS = 120.0  # how far back a forecast on request looks for a user's earlier jobs
_HISTORY_AGE_S = 120.0


class RuntimeForecasts:
    """Forecasts runtimes of jobs not yet submitted, for the API: champion models on the history in the store.

    The history of a cluster is read again when it is older than two minutes.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._history: dict[str, tuple[float, Any]] = {}

    def __call__(self, cluster: str, jobs: Sequence[dict[str, Any]]) -> list[Any]:
        """One `Quantiles` for each job, in order.

        Raises:
            ForecastUnavailableError: The store or the model cannot be read now.
        """
        import polars as pl

        from features.vocabulary import JOB_COLUMNS, QUANTILE_COLUMNS, schema
        from models.live import forecast_jobs
        from models.registry import Registry
        from scheduler_hints.errors import ForecastUnavailableError
        from scheduler_hints.schema import Quantiles

        now = datetime.now(UTC)
        types = {name: schema("core_jobs")[name] for name in JOB_COLUMNS}
        rows = [
            {**dict.fromkeys(JOB_COLUMNS), **job, "cluster": cluster, "job_id": f"{i}", "state": "PENDING"}
            for i, job in enumerate(jobs)
        ]
        frame = pl.DataFrame(rows, schema=types)
        try:
            history = self._past(cluster)
            registry = Registry(self._settings.registry / cluster)
            forecasts = forecast_jobs(registry, frame, history, now).filter(pl.col("forecast") == "runtime")
        except Exception as error:
            log.exception("runtime forecast failed")
            raise ForecastUnavailableError(f"no runtime forecast now: {error}") from error
        by_id = {row["job_id"]: row for row in forecasts.to_dicts()}
        return [Quantiles(**{name: by_id[f"{i}"][name] for name in QUANTILE_COLUMNS}) for i in range(len(jobs))]

    def _past(self, cluster: str) -> Any:
        with self._lock:
            read_at, history = self._history.get(cluster, (float("-inf"), None))
            if history is None or time.monotonic() - read_at > _HISTORY_AGE_S:
                from pipelines.compose import open_store
                from pipelines.job_history import read_jobs

                with open_store(self._settings) as store:
                    since = datetime.now(UTC) - timedelta(days=_HISTORY_DAYS)
                    history = read_jobs(store, cluster, since)
                self._history[cluster] = (time.monotonic(), history)
            return history


class ApiError(Exception):
    """The hints API could not be asked, or refused; `code` and `message` as the API gives them."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class HintsOverHttp:
    """Asks the hints API of these settings; the token, where one is needed, is `WEATHERGLASS_TOKEN`."""

    def __init__(self, settings: Settings) -> None:
        import httpx

        self._url = api_url(settings)
        token = os.environ.get("WEATHERGLASS_TOKEN")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(base_url=self._url, timeout=5, headers=headers)

    def __call__(self, path: str, params: dict[str, Any]) -> dict[str, Any]:
        """Parsed JSON of an answer; of a 503 the error's.

        Raises:
            ApiError: The API does not answer, or refuses.
        """
        import httpx

        try:
            answer = self._client.get(path, params=params)
            body = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ApiError("unreachable", f"the hints API at {self._url} does not answer: {error}") from error
        if answer.status_code in {200, 503}:
            return body
        if answer.status_code == 401:
            advice = "make one with `weatherglass token create dashboards` and set WEATHERGLASS_TOKEN to it"
            raise ApiError("unauthorized", f"the hints API wants a token of this page's server: {advice}")
        raise ApiError(body["error"]["code"], body["error"]["message"])


def api_url(settings: Settings) -> str:
    """Where processes of this machine reach the hints API."""
    host = "127.0.0.1" if settings.api.host in {"0.0.0.0", "::"} else settings.api.host
    return f"http://{host}:{settings.api.port}"
