"""Progress of jobs: sent to the API, kept through kills, in the store once; and told by metrics of applications."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from features.metrics import DEFAULT, MetricError
from pipelines.ingest import Ingested
from pipelines.job_history import JobsIngested
from pipelines.job_progress import ingest_progress_series, load_sent_progress
from pipelines.settings import parse_settings
from pipelines.sources import SourceError
from pipelines.sources.progress_series import read_progress_series
from pipelines.sources.promql import PromQL
from pipelines.sources.promql_matrix import Matrix
from pipelines.steps import ClusterIngested, ingest_progress_of
from pipelines.store import Store, StoreError
from scheduler_hints import progress
from scheduler_hints.api import create_app
from scheduler_hints.client import HintsClient, HintsUsageError
from scheduler_hints.tokens import TokenStore, create_token
from tests import ksm_pages as ksm
from tests.hints_support import ROOT, Reply, ask, running_server
from tests.services import Prometheus

JSON = {"content-type": "application/json"}
T0 = datetime(2026, 3, 14, 3, 0, tzinfo=UTC)
ROW = {"job_id": "7", "ts": T0.isoformat(), "step": 10, "step_time_s": 1.5, "loss": 2.25, "phase": "train"}


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as opened:
        yield opened


def send(published: Path, *rows: dict[str, Any], headers: dict[str, str] = JSON, **more: Any) -> Reply:
    app = create_app(published, ["alpha"], **more)
    body = json.dumps({"cluster": "alpha", "rows": rows}).encode()
    return ask(app, "/v1/progress", method="POST", body=body, headers=headers)


def stored(store: Store) -> list[tuple[Any, ...]]:
    columns = "job_id, rank, ts, step, step_time_s, loss, phase, source"
    return store.query(f"SELECT {columns} FROM core_job_progress ORDER BY job_id, rank, ts").rows()


def test_what_is_sent_reaches_the_store_once(tmp_path: Path, store: Store) -> None:
    published = tmp_path / "published"
    assert load_sent_progress(store, published, "alpha") == 0
    reply = send(published, ROW, {"job_id": "7", "ts": "2026-03-14T04:00:00+01:00", "rank": 3, "phase": "checkpoint"})
    assert (reply.status, reply.json()["kept"]) == (200, 2)
    assert load_sent_progress(store, published, "alpha") == 2
    assert load_sent_progress(store, published, "alpha") == 0
    told = [("7", 3, T0, None, None, None, "checkpoint", "api"), ("7", None, T0, 10, 1.5, 2.25, "train", "api")]
    assert stored(store) == told
    send(published, ROW)
    send(published, ROW | {"step": 11})  # said again, and put right
    load_sent_progress(store, published, "alpha")
    assert [row[3] for row in stored(store)] == [None, 11]
    assert not list(progress.progress_folder(published, "alpha").glob("*.jsonl"))


def test_a_row_without_a_time_is_of_now(tmp_path: Path, store: Store) -> None:
    before = datetime.now(UTC)
    assert send(tmp_path, {"job_id": "7", "step": 1}).status == 200
    load_sent_progress(store, tmp_path, "alpha")
    assert before <= stored(store)[0][2] <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("row", "status", "words"),
    [
        (ROW | {"phase": "sleep"}, 400, ["rows[0].phase", "sleep", "startup, train, evaluation, checkpoint"]),
        (ROW | {"colour": 1}, 422, ["colour", "step_time_s"]),
        (ROW | {"step": -1}, 422, ["step", ">= 0"]),
        (ROW | {"step": 1.5}, 422, ["step", "int"]),
        (ROW | {"step_time_s": 90_000}, 422, ["step_time_s", "86400"]),
        *((ROW | {"step_time_s": wrong}, 422, [">= 1e-06", "rows[0].step_time_s"]) for wrong in (0, -1.5)),
        (ROW | {"max_steps": 0}, 422, ["max_steps", ">= 1"]),
        (ROW | {"max_steps": 9}, 400, ["rows[0].max_steps", "at least step, 10"]),
        (ROW | {"rank": -1}, 422, ["rank", ">= 0"]),
        (ROW | {"ts": "2026-03-14T03:00:00"}, 422, ["ts", "timezone"]),
        (ROW | {"ts": "1999-03-14T03:00:00Z"}, 400, ["rows[0].ts", "1999", "2000"]),
        (ROW | {"ts": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}, 400, ["rows[0].ts", "ahead"]),
        (ROW | {"job_id": ""}, 422, ["job_id"]),
        (ROW | {"job_id": "7\0"}, 422, ["job_id"]),
        (ROW | {"job_id": "7\n"}, 422, ["job_id"]),
        (ROW | {"job_id": "\ud800"}, 400, ["JSON"]),
        (ROW | {"communication_time_s": 1.6}, 400, ["rows[0].communication_time_s", "at most step_time_s, 1.5"]),
        (ROW | {"communication_time_s": -0.1}, 422, [">= 0", "rows[0].communication_time_s"]),
        ({"job_id": "7"}, 400, ["rows[0]", "step, step_time_s, communication_time_s, loss, phase"]),
        (ROW | {"loss": float("nan")}, 400, ["JSON"]),
    ],
)
def test_a_wrong_row_is_refused_with_its_field_and_the_choices(
    tmp_path: Path, row: dict[str, Any], status: int, words: list[str]
) -> None:
    reply = send(tmp_path, row)
    assert reply.status == status, reply.body
    assert all(word in reply.json()["error"]["message"] for word in words), reply.body
    assert not (tmp_path / "alpha").exists()


def test_bounds_of_a_request(tmp_path: Path) -> None:
    assert send(tmp_path, *[ROW] * 1000).json()["kept"] == 1000
    assert [send(tmp_path, *[ROW] * count).status for count in (0, 1001)] == [422, 422]
    assert send(tmp_path, headers={}).status == 415
    assert send(tmp_path, headers={"content-type": "text/plain"}).status == 415
    assert ask(create_app(tmp_path, ["alpha"]), "/v1/progress").status == 405
    wrong = json.dumps({"cluster": "../x", "rows": [ROW]}).encode()
    assert ask(create_app(tmp_path, ["alpha"]), "/v1/progress", method="POST", body=wrong, headers=JSON).status == 400


def test_only_a_token_that_may_place_sends(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    secrets = {role: create_token(file, role, role) for role in ("read", "place")}
    other = create_token(file, "other", "place", ["beta"])
    for secret, status in ((secrets["read"], 403), (secrets["place"], 200), (other, 403), ("x", 401)):
        headers = JSON | {"authorization": f"Bearer {secret}"}
        assert send(tmp_path, ROW, headers=headers, tokens=TokenStore(file)).status == status


def test_a_full_journal_refuses_and_is_emptied_by_an_ingest(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "MAX_JOURNAL_BYTES", 250)
    assert [send(tmp_path, ROW).status for _ in range(3)] == [200, 200, 503]
    assert load_sent_progress(store, tmp_path, "alpha") == 1
    assert send(tmp_path, ROW).status == 200


def test_a_folder_that_cannot_be_written_is_an_outage(tmp_path: Path) -> None:
    (tmp_path / "alpha").write_text("no folder")
    reply = send(tmp_path, ROW)
    assert (reply.status, reply.json()["error"]["code"]) == (503, "journal_unwritable")


def test_what_was_answered_survives_kills_on_either_side(tmp_path: Path, store: Store) -> None:
    rows = [progress.ProgressRow("7", ts=T0, step=1)]
    child = (
        "import os, signal, sys\nfrom datetime import UTC, datetime\nfrom pathlib import Path\n"
        "from scheduler_hints.progress import ProgressRow, keep_progress\nnow = datetime(2026, 3, 14, 3, tzinfo=UTC)\n"
        "keep_progress(Path(sys.argv[1]), 'alpha', [ProgressRow('8', step=2)], now)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", child, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    with (progress.progress_folder(tmp_path, "alpha") / "open.jsonl").open("ab") as file:
        file.write(b'[{"job_id":"9","ts":"2026-03-1')  # cut off: nobody was told that it is kept
    progress.keep_progress(tmp_path, "alpha", rows, T0)

    [path] = progress.taken(tmp_path, "alpha")  # a reader that is killed before its rows are in, …
    progress.keep_progress(tmp_path, "alpha", [msgspec.structs.replace(rows[0], ts=T0 + timedelta(minutes=1))], T0)
    kept = path.read_bytes()
    assert load_sent_progress(store, tmp_path, "alpha") == 2
    path.write_bytes(kept)  # … or after, before the file is gone
    assert [load_sent_progress(store, tmp_path, "alpha") for _ in range(3)] == [2, 1, 0]
    assert [row[0] for row in stored(store)] == ["7", "7", "8"]


def test_a_store_that_refuses_leaves_the_journal(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    send(tmp_path, ROW)

    def refuse(*_: Any, **__: Any) -> int:
        raise StoreError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "transact", refuse)
        with pytest.raises(StoreError):
            load_sent_progress(store, tmp_path, "alpha")
    assert load_sent_progress(store, tmp_path, "alpha") == 1


class Recorded:
    """A Prometheus that gives what was recorded."""

    def __init__(self, *series: tuple[str, dict[str, str], list[float]]) -> None:
        self.series = series
        self.query = ""

    def matrix(self, query: str, at_ms: int | None = None) -> Matrix:
        self.query = query
        labels = [msgspec.json.encode({"__name__": name} | labels) for name, labels, _ in self.series]
        counts = np.array([len(values) for *_, values in self.series], np.int64)
        start = int(T0.timestamp() * 1000)
        ts = [start + 60_000 * minute for *_, values in self.series for minute in range(len(values))]
        return Matrix(
            labels, counts, np.array(ts, np.int64), np.array([v for *_, vs in self.series for v in vs], float)
        )


def test_metrics_of_an_application_become_rows() -> None:
    seven, scraped = {"job_id": "7"}, {"exported_job": "8", "job": "trainers", "rank": "1"}
    api = Recorded(
        ("training_step", seven, [10, 11]),
        ("training_max_steps", seven, [100, 0]),
        ("training_step_time_seconds", seven, [1.5, 100_000]),
        ("training_step_time_seconds", scraped, [0]),  # before its first step
        ("training_communication_time_seconds", seven, [0.5, 0.25]),
        ("training_loss", seven, [2.25, float("nan")]),
        ("training_phase", seven | {"phase": "train"}, [1, 0]),
        ("training_phase", seven | {"phase": "checkpoint"}, [0, 1]),
        ("training_step", scraped, [5]),
        ("training_step", {"job": "trainers"}, [5]),
        ("training_step", seven | {"rank": "first"}, [5]),
        ("training_phase", seven | {"phase": "sleep"}, [1]),
    )
    frame, warnings = read_progress_series(api, "a", T0, T0 + timedelta(minutes=9), matcher='cluster="a"')
    columns = ["job_id", "rank", "step", "max_steps", "step_time_s", "communication_time_s", "loss", "phase"]
    assert frame.select(columns).rows() == [
        ("7", None, 10, 100, 1.5, 0.5, 2.25, "train"), ("7", None, 11, None, None, 0.25, None, "checkpoint"),
        ("8", 1, 5, None, None, None, None, None),
    ]  # fmt: skip
    assert frame["source"].unique().to_list() == ["prometheus"]
    assert frame["ts"].to_list() == [T0, T0 + timedelta(minutes=1), T0]
    assert 'cluster="a"' in api.query
    assert len(warnings) == 4
    for word in ("job_id", "rank", "startup, train", "4 series"):
        assert any(word in warning for warning in warnings), word


def test_own_names_are_mapped() -> None:
    table = DEFAULT.overridden(
        {
            "acme_step_milliseconds": {"column": "step_time_s", "entity": "progress", "scale": 0.001},
            "acme_loss": {"column": "loss"},
            "training_step": {"column": ""},
        }
    )
    labels = {"slurm_job_id": "7"}
    api = Recorded(
        ("acme_step_milliseconds", labels, [1500]), ("acme_loss", labels, [2]), ("training_step", labels, [1])
    )
    frame, _ = read_progress_series(api, "a", T0, T0 + timedelta(minutes=1), table=table)
    assert frame.select("job_id", "step", "step_time_s", "loss").rows() == [("7", None, 1.5, 2.0)]
    assert "training_step|" not in api.query
    # Who maps a step time without more means that of a GPU, as ever.
    assert DEFAULT.overridden({"x": {"column": "step_time_s"}}).by_name["x"][0].entity == "gpu"
    with pytest.raises(MetricError, match="progress"):
        DEFAULT.overridden({"x": {"column": "loss", "entity": "gpu"}})


def test_metrics_are_read_on_from_the_mark_and_again_gives_the_same(store: Store) -> None:
    api = Recorded(("training_step", {"job_id": "7"}, [1, 2, 3]))
    for minutes in (2, 2, 4):
        ingest_progress_series(store, api, "a", T0 + timedelta(minutes=minutes))
    assert store.query("SELECT max(observed_at) AS at FROM core_job_progress")["at"][0] == T0 + timedelta(minutes=4)
    assert [(row[2], row[3]) for row in stored(store)] == [(T0 + timedelta(minutes=i), i + 1) for i in range(3)]


def test_an_outage_of_the_prometheus_keeps_nothing_waiting(tmp_path: Path, store: Store) -> None:
    alpha = {"telemetry": "prometheus", "jobs": "none", "prometheus_url": "http://127.0.0.1:9"}
    settings = parse_settings(
        {"state_dir": str(tmp_path), "clusters": {"alpha": alpha | {"prometheus_timeout_s": 1}}}, {}
    )
    send(settings.published, ROW)
    report = ingest_progress_of(store, settings, "alpha", datetime.now(UTC))
    assert (report.sent_rows, report.metric_rows) == (1, 0)
    assert "127.0.0.1:9" in str(report.error)
    lost = Ingested("alpha", error=report.error)
    assert ClusterIngested("alpha", JobsIngested("alpha"), lost, progress=report).errors == [report.error]  # said once
    assert store.mark("alpha", "progress") is None


def test_a_journal_that_cannot_be_read_is_told(tmp_path: Path, store: Store) -> None:
    (progress.progress_folder(tmp_path, "alpha") / "1.jsonl").mkdir(parents=True)
    with pytest.raises(SourceError, match="journal of progress"):
        load_sent_progress(store, tmp_path, "alpha")


@pytest.mark.services("prometheus", "promtool")
def test_a_real_prometheus(prometheus: Callable[..., Prometheus]) -> None:
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=6)
    end = start + timedelta(minutes=10)
    labels = {"job": "trainers", "instance": "n1:1", "job_id": "7"}
    told: list[ksm.Series] = [
        ("training_step", labels, 12),
        ("training_loss", labels, 0.5),
        ("training_phase", labels | {"phase": "train"}, 1),
    ]
    api = PromQL("a", prometheus(history=ksm.history((start, end, told))).url, 30)
    frame, warnings = read_progress_series(api, "a", start + timedelta(minutes=2), start + timedelta(minutes=5))
    assert frame.select("job_id", "step", "loss", "phase").rows() == [("7", 12, 0.5, "train")] * 3
    assert warnings == []


def test_the_client_sends(tmp_path: Path, store: Store) -> None:
    arguments = ("-m", "scheduler_hints.server", "--published", str(tmp_path), "--cluster", "alpha", "--port", "0")
    with running_server(*arguments) as (url, _), HintsClient(url) as client:
        answer = client.send_progress("alpha", [{"job_id": "7", "step": 3}])
        assert (answer.is_fresh, answer.facts["kept"]) == (True, 1)
        with pytest.raises(HintsUsageError, match="phase"):
            client.send_progress("alpha", [{"job_id": "7", "phase": "sleep"}])
    with HintsClient("http://127.0.0.1:9") as client:
        assert not client.send_progress("alpha", [{"job_id": "7", "step": 3}]).is_fresh
    assert load_sent_progress(store, tmp_path, "alpha") == 1
