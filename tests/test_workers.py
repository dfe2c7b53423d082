"""The spreading of a run over workers: every name is of a file, nothing is lost by ordering, ports are not shared."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

from tests import services, workers

FILES = {path.stem for path in Path(__file__).parent.glob("test_*.py")}


def test_every_named_file_is_there():
    assert set(workers.LONGEST) <= FILES
    assert set(workers.APART) <= FILES
    assert len(set(workers.LONGEST)) == len(workers.LONGEST)


def test_the_longest_come_first_and_all_others_stay_in_place():
    names = [f"tests/{name}.py::test_{number}" for name in sorted(FILES) for number in (2, 1)]
    items = [SimpleNamespace(nodeid=name) for name in names]
    workers.order(items)
    found = [item.nodeid for item in items]
    assert sorted(found) == sorted(names)
    files = list(dict.fromkeys(workers.unit(name).split("::")[0] for name in found))
    longest = [f"tests/{name}.py" for name in workers.LONGEST]
    assert files == longest + [f"tests/{name}.py" for name in sorted(FILES) if name not in workers.LONGEST]
    assert found[:2] == [f"{longest[0]}::test_2", f"{longest[0]}::test_1"]


def test_a_file_goes_to_one_worker_unless_it_may_be_taken_apart():
    assert hasattr(LoadScopeScheduling, "_split_scope"), "the name by which xdist asks"
    assert workers.unit("tests/test_store.py::test_a[x::y]") == "tests/test_store.py"
    apart = f"tests/{workers.APART[0]}.py::test_a[x::y]"
    assert workers.unit(apart) == apart


def test_workers_share_no_port(monkeypatch: pytest.MonkeyPatch):
    shares = []
    for number in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{number}")
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
        shares.append(set(workers.share_of(range(100))))
    assert set.union(*shares) == set(range(100))
    assert sum(map(len, shares)) == 100
    assert len({services.free_port() for _ in range(50)}) == 50
