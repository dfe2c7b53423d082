"""What lower layers are given from higher ones: forecasts on request for the API, the API for the dashboards.

Small classes with the signatures that those layers ask for; putting them in place is `pipelines/compose.py`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipelines.settings import Settings

log = logging.getLogger(__name__)

_HISTORY_DAYS = 120.0  # how far back a forecast on request looks for a user's earlier jobs
_HISTORY_AGE_S = 120.0  # older, what was written since is taken in
_WHOLE_AGE_S = 6 * 3600.0  # older, all is read anew: what has grown too old is left behind


@dataclass
class _Known:
    """What is kept of one cluster between requests; asked and changed under its lock."""

    champions: Any
    lock: threading.Lock = field(default_factory=threading.Lock)
    history: Any = None
    snapshot: int | None = None  # of the store, that all of it was taken in of
    heard_at: datetime | None = None  # until when the scheduler was read, or the newest row was heard of
    whole_at: float = float("-inf")
    read_at: float = float("-inf")


class RuntimeForecasts:
    """Forecasts runtimes of jobs not yet submitted, for the API: champion models on the history in the store.

    Models stay in memory until the registry names others. So does the prepared history: what was written in the last
    two minutes or more is taken into it, and every six hours it is made anew.
    Jobs of one request are taken each for itself: what is not submitted is no past of another.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}

    def __call__(self, cluster: str, jobs: Sequence[dict[str, Any]]) -> Any:
        """A `scheduler_hints.forecasts.Forecast` of each job, in order.

        Raises:
            ForecastUnavailableError: The store or the model cannot be read now.
        """
        import polars as pl

        from features.jobs import microseconds
        from features.vocabulary import JOB_COLUMNS, QUANTILE_COLUMNS, schema
        from models.live import ended_jobs, forecast_runtimes
        from pipelines.store_errors import StoreMissing
        from scheduler_hints.errors import ForecastUnavailableError
        from scheduler_hints.forecasts import Forecast
        from scheduler_hints.schema import Quantiles

        now = datetime.now(UTC)
        columns = (*JOB_COLUMNS, "gpu_type", "node_features")
        types = {name: schema("core_jobs")[name] for name in columns}
        rows = [
            {**dict.fromkeys(columns), **job, "cluster": cluster, "job_id": f"?{i}", "state": "PENDING"}
            for i, job in enumerate(jobs)
        ]
        frame = pl.DataFrame(rows, schema=types)
        try:
            known = self._of(cluster)
            with known.lock:
                history = self._past(cluster, known)
                version, found = forecast_runtimes(known.champions, frame, history, now)
                ended, heard_at = ended_jobs(history, microseconds(now)), known.heard_at
        except Exception as error:
            log.error("no runtime forecast for %s: %s", cluster, error, exc_info=not isinstance(error, StoreMissing))
            raise ForecastUnavailableError(f"no runtime forecast now: {error}") from error
        return Forecast(
            runtimes=[Quantiles(**row) for row in found.select(QUANTILE_COLUMNS).iter_rows(named=True)],
            modes_s=found["mode_s"].to_list(),
            model_version=version,
            ended_jobs=ended,
            history_days=_HISTORY_DAYS,
            data_age_s=None if heard_at is None else max(0.0, (now - heard_at).total_seconds()),
            ttl_s=self._settings.hints.job_ttl_s,
        )

    def prepare(self, clusters: Sequence[str]) -> None:
        """Load the models and have loops compiled, so that no request waits for it; trouble is logged."""
        import polars as pl

        from features.job_history import JobHistory
        from models.live import Champions, forecast_runtimes

        now = datetime.now(UTC)
        times = {"submit_time": now - timedelta(hours=2), "start_time": now - timedelta(hours=1), "end_time": now}
        made_up = pl.DataFrame({"job_id": ["1", "2"], "user": "", "nodes": 1, "time_limit_s": 3600, **times})
        try:
            for cluster in clusters:
                history = JobHistory(made_up[:1])
                for _ in range(2):  # at the second the indexes are there to grow
                    known = self._of(cluster)
                    with known.lock:
                        # Keyed recency is kept for some time: what made-up jobs say is for nobody's request.
                        is_led = known.champions.get("runtime")[1] is not None
                        champions = known.champions if is_led else Champions(None)
                        forecast_runtimes(champions, made_up, history, now + timedelta(hours=1))
                    history.update(made_up)
        except Exception:
            log.exception("preparing runtime forecasts failed")

    def _of(self, cluster: str) -> _Known:
        from models.live import Champions
        from models.registry import Registry

        with self._lock:
            if cluster not in self._known:
                self._known[cluster] = _Known(Champions(Registry(self._settings.registry / cluster)))
            return self._known[cluster]

    def _past(self, cluster: str, known: _Known) -> Any:
        """The prepared history, brought up to date when it has grown old."""
        from features.job_history import JobHistory
        from pipelines.compose import open_store
        from pipelines.job_history import MARK, read_jobs, read_jobs_written_since

        now = time.monotonic()
        if now - known.read_at <= _HISTORY_AGE_S:
            return known.history
        with open_store(self._settings, read_only=True) as store:
            snapshot = store.snapshot()  # what is written from here on is read again the next time
            read_until = store.mark(cluster, MARK)
            # A smaller one is that of another store at the same place.
            is_old = known.snapshot is None or snapshot < known.snapshot or now - known.whole_at > _WHOLE_AGE_S
            if is_old or known.snapshot is None:
                jobs = read_jobs(store, cluster, datetime.now(UTC) - timedelta(days=_HISTORY_DAYS))
                known.history, known.whole_at, known.heard_at = JobHistory(jobs), now, None
            else:
                jobs = read_jobs_written_since(store, cluster, known.snapshot)
                known.snapshot = None  # should it fail in the middle, all is read again
                known.history.update(jobs)
        heard = jobs["observed_at"].max()  # of imported jobs; what a scheduler told was read until the mark
        told = [at for at in (known.heard_at, read_until, heard) if isinstance(at, datetime)]
        known.heard_at = max(told, default=None)
        known.snapshot, known.read_at = snapshot, now
        return known.history


class StoreReader:
    """Reads the store of these settings, for the dashboards: `query(sql, params)`, from any thread.

    It is opened at the first query, so that pages can be served before the first ingest, and anew when another
    catalogue stands at its place.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._store: Any = None
        self._identity: tuple[int, int] | None = None

    def __call__(self, sql: str, params: Any = ()) -> Any:
        """Rows of one SELECT, as `Store.query` gives them.

        Raises:
            StoreMissing: There is no store; it is looked for again at the next query.
            StoreError: It cannot be read, or the query is wrong.
        """
        return self._opened().query(sql, params)

    def _opened(self) -> Any:
        from pipelines.compose import open_store

        with self._lock:
            identity = self._identity_now()
            if self._store is None or identity != self._identity:
                self._store = None  # other threads may be reading it still: it goes with the last of them
                self._store = open_store(self._settings, read_only=True)
                self._identity = identity
            return self._store

    def _identity_now(self) -> tuple[int, int] | None:
        """Device and number of the file that the catalogue is; None where it is none, or gone."""
        kind, _, path = self._settings.store_url.partition(":")
        if kind != "sqlite":
            return None
        try:
            found = Path(path).stat()
        except OSError:
            return (-1, -1)
        return (found.st_dev, found.st_ino)


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
