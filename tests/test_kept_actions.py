"""What agents record reaches the store: no row lost between writer and loader, cut lines passed over, labels hidden."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipelines.exclusions import read_exclusions
from pipelines.kept_actions import keep_actions
from pipelines.sources import SourceError
from pipelines.store import Store
from scheduler_hints.slurm_audit import Ledger, actions_path, jsonl_audit

T0 = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path):
    with Store.open(f"sqlite:{tmp_path}/c.sqlite", str(tmp_path / "data")) as store:
        yield store


def test_actions_reach_the_store_once_and_censor_labels(store: Store, tmp_path: Path) -> None:
    audit = jsonl_audit(actions_path(tmp_path, "alpha"))
    ledger = Ledger("alpha", audit, lambda: T0, "kubernetes-agent")
    ledger.put("taint", is_applied=True, reason="heat", nodes=frozenset({"n1"}))
    ledger.put("annotate", is_applied=True, reason="heat", nodes=frozenset({"n2"}))
    ledger.put("taint", is_applied=False, reason="heat", nodes=frozenset({"n3"}), leases=2)
    assert keep_actions(store, tmp_path, "alpha") == 3
    assert keep_actions(store, tmp_path, "alpha") == 0
    assert list((tmp_path / "actions").iterdir()) == []
    rows = store.query("SELECT node, action, actor, is_applied, detail FROM out_actions ORDER BY node").rows()
    assert rows == [
        ("n1", "taint", "kubernetes-agent", True, None), ("n2", "annotate", "kubernetes-agent", True, None),
        ("n3", "taint", "kubernetes-agent", False, '{"leases":2}'),
    ]  # fmt: skip
    spans = read_exclusions(store, "alpha", T0 - timedelta(hours=1), T0 + timedelta(hours=1), drained_since=T0)
    assert spans["node"].to_list() == ["n1"], "an annotation moves nothing, advice neither"


def test_what_a_crash_left_is_read_and_what_it_cut_is_passed_over(store: Store, tmp_path: Path) -> None:
    path = actions_path(tmp_path, "alpha")
    audit = jsonl_audit(path)
    row = {"ts": T0, "cluster": "alpha", "actor": "slurm-agent", "action": "reserve", "node": "n1", "job_id": ""}
    audit(row | {"is_applied": True, "reason": "r"})
    with path.open("ab") as file:
        file.write(b'{"ts": "2026-03-01T00:00:0')
    audit(row | {"node": "n2", "is_applied": True, "reason": "r"})
    audit(row | {"cluster": "beta", "is_applied": True})
    path.rename(path.with_name("alpha.00000000000000000001.taken"))  # a loader died here
    audit(row | {"node": "n3", "is_applied": True, "reason": "r"})
    assert keep_actions(store, tmp_path, "alpha") == 2
    assert keep_actions(store, tmp_path, "alpha") == 1
    assert store.query("SELECT node FROM out_actions ORDER BY node")["node"].to_list() == ["n1", "n2", "n3"]


def test_clusters_whose_names_begin_alike_keep_their_own_rows(store: Store, tmp_path: Path) -> None:
    path = actions_path(tmp_path, "alpha.b")
    jsonl_audit(path)({"ts": T0, "cluster": "alpha.b", "actor": "a", "action": "reserve", "node": "n1", "job_id": "",
                       "is_applied": False, "reason": "r"})  # fmt: skip
    path.rename(path.with_name("alpha.b.00000000000000000001.taken"))  # its loader died
    assert keep_actions(store, tmp_path, "alpha") == 0
    assert keep_actions(store, tmp_path, "alpha.b") == 1


def test_no_row_is_lost_while_it_is_written_and_loaded(store: Store, tmp_path: Path) -> None:
    path = actions_path(tmp_path, "alpha")

    def write(writer: int) -> None:
        audit = jsonl_audit(path)
        for i in range(60):
            audit({"ts": T0 + timedelta(seconds=i), "cluster": "alpha", "actor": f"a{writer}", "action": "reserve",
                   "node": "n1", "job_id": "", "is_applied": False, "reason": "r"})  # fmt: skip

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        keep_actions(store, tmp_path, "alpha")
    for thread in threads:
        thread.join()
    keep_actions(store, tmp_path, "alpha")
    assert store.query("SELECT count(*) AS n FROM out_actions")["n"].item() == 180


def test_a_record_that_cannot_be_read_is_an_error_that_names_it(store: Store, tmp_path: Path) -> None:
    actions_path(tmp_path, "alpha").mkdir(parents=True)
    with pytest.raises(SourceError, match="alpha: the record of actions cannot be read"):
        keep_actions(store, tmp_path, "alpha")
