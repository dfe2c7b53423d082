"""The same store on a real PostgreSQL catalogue: nothing but the URL changes, and no lock keeps writers apart."""

import threading
from datetime import UTC, datetime

import pytest

from pipelines.store import Store, StoreNotMade, StoreUnwritable
from tests.store_child import WINDOWS, open_store, run, window, write_window
from tests.store_services import postgres

__all__ = ["postgres"]  # a fixture
TABLES = ("core_gpu_samples", "core_node_samples")


def test_writers_that_race_for_the_same_empty_windows_double_nothing(postgres, tmp_path):
    url, data = f"postgres:{postgres}", str(tmp_path / "data")
    for _ in range(2):  # the first has made nothing
        with pytest.raises(StoreNotMade, match=r"no store there yet.*names another database"):
            Store.open(url, data, read_only=True)
    assert not (tmp_path / "data").exists()
    failures = []

    def write(indices):
        try:
            with Store.open(url, data) as store:
                for index in indices:
                    write_window(store, index, "a")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(range(6),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    with Store.open(url, data) as store:
        assert store.mark("a", "test") == window(5, "a")[1]
        store.compact(datetime.now(UTC))
        store.expire(datetime.now(UTC), 7)
        assert all(check.ok for check in store.check())
        found = [store.table_hash(table) for table in TABLES]
    run(tmp_path / "sqlite", "a", windows=6)
    with open_store(tmp_path / "sqlite") as other:
        assert found == [other.table_hash(table) for table in TABLES]
    assert WINDOWS > 6


def test_a_server_that_is_not_there_is_named_without_its_password(tmp_path, free_port):
    url = f"postgres:host=127.0.0.1 port={free_port()} user=x password=secret dbname=x"
    with pytest.raises(StoreUnwritable, match=r"password=\*\*\* dbname=x") as caught:
        Store.open(url, str(tmp_path / "data"))
    assert "secret" not in str(caught.value)
