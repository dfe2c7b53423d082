"""The registry: what is saved comes back unaltered, damage is noticed and named, and there is a way back."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from models.registry import ChampionChangedError, Registry, RegistryError, code_revision

ROOT = Path(__file__).resolve().parent.parent
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "registry" / "alpha")


def _save(registry, hour=0, text=b"tree", **card):
    moment = NOON + timedelta(hours=hour)
    return registry.save("runtime", {"model.txt": text, "training.parquet": b"PAR1"}, {"trained_at": moment, **card})


def _champions(registry, count):
    names = [_save(registry, hour, b"model %d" % hour) for hour in range(count)]
    for name in names:
        registry.promote("runtime", name, "better", at=NOON)
    return names


def test_saved_version_comes_back_with_its_facts(registry):
    version = _save(registry, features=["a"], seed=3)
    loaded = registry.load("runtime", version)
    assert loaded.files == {"model.txt": b"tree"}
    assert registry.load("runtime", version, with_tables=True).files["training.parquet"] == b"PAR1"
    assert loaded.card["features"] == ["a"]
    assert loaded.card["task"] == "runtime"
    assert set(loaded.card["libraries"]) == {"numpy", "polars", "scikit-learn", "lightgbm"}
    assert loaded.card["files"]["model.txt"]["bytes"] == 4
    assert version.startswith("20260301T120000Z-")


def test_same_content_is_one_version_and_other_content_another(registry):
    assert _save(registry) == _save(registry)
    assert _save(registry) != _save(registry, text=b"other")
    assert _save(registry) != _save(registry, seed=4)
    assert len(registry.versions("runtime")) == 3


@pytest.mark.parametrize("name", ["model.pkl", "../model.txt", "card.json", "a/b.txt", "model.joblib", ".hidden.txt"])
def test_formats_that_carry_code_and_paths_are_refused(registry, name):
    with pytest.raises(RegistryError, match="cannot be kept"):
        registry.save("runtime", {name: b"x"}, {})
    assert not registry.root.exists()


def test_a_card_with_nan_is_refused(registry):
    with pytest.raises(RegistryError, match="not JSON"):
        _save(registry, metrics={"male": float("nan")})


@pytest.mark.parametrize("task", ["..", "a/b", "", ".x"])
def test_a_task_is_a_plain_name(registry, task):
    with pytest.raises(RegistryError, match="no name of a task"):
        registry.champion(task)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("name", ["model.txt", "card.json"])
def test_damage_is_noticed_and_names_the_file(registry, damage, name):
    version = _save(registry)
    path = registry.root / "runtime" / version / name
    data = path.read_bytes()
    if damage == "flip":
        path.write_bytes(data[:1] + bytes([data[1] ^ 1]) + data[2:])
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    with pytest.raises(RegistryError, match=name):
        registry.load("runtime", version)


def test_damaged_training_table_is_noticed(registry):
    version = _save(registry)
    path = registry.root / "runtime" / version / "training.parquet"
    path.write_bytes(b"PAR2")
    registry.load("runtime", version)  # serving does not depend on it
    with pytest.raises(RegistryError, match=r"training\.parquet"):
        registry.load("runtime", version, with_tables=True)
    path.write_bytes(b"P")
    with pytest.raises(RegistryError, match=r"training\.parquet"):
        registry.load("runtime", version)


def test_nothing_promoted_means_no_champion_and_the_error_lists_versions(registry):
    assert registry.champion("runtime") is None
    version = _save(registry)
    with pytest.raises(RegistryError, match=version):
        registry.load("runtime")
    with pytest.raises(RegistryError, match="no version 'missing'"):
        registry.load("runtime", "missing")


def test_promotion_and_rollback_go_back_step_by_step(registry):
    first, second, third = _champions(registry, 3)
    assert registry.load("runtime").version == third
    assert registry.rollback("runtime", "drift", actor="ann", at=NOON) == second
    assert registry.rollback("runtime", "more drift") == first
    with pytest.raises(RegistryError, match="no sound champion before"):
        registry.rollback("runtime", "again")
    assert registry.champion("runtime") == first
    rolled = registry.history("runtime")[3]
    assert (rolled["action"], rolled["previous"], rolled["actor"], rolled["reason"]) == (
        "rollback",
        third,
        "ann",
        "drift",
    )
    assert rolled["at"] == NOON.isoformat()
    assert [card["is_champion"] for card in registry.versions("runtime")] == [False, False, True]


def test_withdrawn_champion_comes_back_by_rollback(registry):
    (only,) = _champions(registry, 1)
    registry.withdraw("runtime", "worse than its baseline")
    assert registry.champion("runtime") is None
    assert registry.rollback("runtime", "withdrawn by mistake") == only


def test_damaged_champion_falls_back_to_the_one_before_and_says_why(registry):
    first, second, third = _champions(registry, 3)
    (registry.root / "runtime" / third / "model.txt").write_bytes(b"model X")
    (registry.root / "runtime" / second / "model.txt").unlink()
    with pytest.raises(RegistryError, match=third):
        registry.load("runtime")
    loaded = registry.load("runtime", fallback=True)
    assert loaded.version == first
    assert third in loaded.fallback_reason
    assert "model.txt" in loaded.fallback_reason
    assert registry.rollback("runtime", "damaged") == first


def test_no_sound_champion_at_all_raises_even_with_fallback(registry):
    (only,) = _champions(registry, 1)
    (registry.root / "runtime" / only / "model.txt").unlink()
    with pytest.raises(RegistryError, match=r"model\.txt"):
        registry.load("runtime", fallback=True)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 3}', b'{"version": "../x"}'])
def test_damaged_pointer_is_named_and_fallback_uses_the_history(registry, content):
    _, second = _champions(registry, 2)
    (registry.root / "runtime" / "champion.json").write_bytes(content)
    with pytest.raises(RegistryError, match=r"champion\.json"):
        registry.champion("runtime")
    assert registry.load("runtime", fallback=True).version == second
    registry.promote("runtime", second, "pointer written anew")
    assert registry.champion("runtime") == second


def test_history_survives_a_line_cut_by_a_crash(registry):
    first, second = _champions(registry, 2)
    path = registry.root / "runtime" / "history.jsonl"
    path.write_bytes(path.read_bytes() + b'{"action": "prom')
    assert registry.rollback("runtime", "x") == first
    assert [item["version"] for item in registry.history("runtime")] == [first, second, first]


def test_damaged_version_is_never_promoted(registry):
    (first,) = _champions(registry, 1)
    second = _save(registry, 5, b"new")
    (registry.root / "runtime" / second / "model.txt").write_bytes(b"ne?")
    with pytest.raises(RegistryError, match=second):
        registry.promote("runtime", second, "better")
    assert registry.champion("runtime") == first


def test_failed_save_leaves_nothing(registry, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        _save(registry)
    assert list((registry.root / "runtime").iterdir()) == []


def test_prune_keeps_champion_and_the_one_before(registry):
    first, second = _champions(registry, 2)
    newer = [_save(registry, 10 + hour, b"n%d" % hour) for hour in range(4)]
    assert set(registry.prune("runtime", keep=1)) == set(newer[:3])
    assert {card["version"] for card in registry.versions("runtime")} == {first, second, newer[3]}


def _promote_many(root, names):
    registry = Registry(root)
    for name in names * 5:
        registry.promote("runtime", name, "race")


def test_processes_that_promote_at_once_leave_one_sound_pointer(registry):
    names = [_save(registry, hour, b"m%d" % hour) for hour in range(2)]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_promote_many, args=(registry.root, [name])) for name in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    history = registry.history("runtime")
    assert len(history) == 10
    assert all(after["previous"] == before["version"] for before, after in itertools.pairwise(history))
    assert registry.champion("runtime") == history[-1]["version"]
    json.loads((registry.root / "runtime" / "champion.json").read_bytes())


def _promote_what_was_judged(root, version, judged, outcome):
    registry = Registry(root)
    champion = registry.present("runtime")
    judged.wait()  # both have looked at the same champion by now
    try:
        registry.promote("runtime", version, "won", expected=champion)
        outcome.put((version, "promoted"))
    except ChampionChangedError as error:
        outcome.put((version, str(error)))


def test_of_two_processes_that_judged_against_one_champion_the_later_is_refused(registry):
    (first,) = _champions(registry, 1)
    rivals = [_save(registry, hour, b"rival %d" % hour) for hour in (5, 6)]
    context = multiprocessing.get_context("spawn")
    judged, outcome = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_promote_what_was_judged, args=(registry.root, name, judged, outcome)) for name in rivals
    ]
    for process in processes:
        process.start()
    said = dict(outcome.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    [winner] = [name for name, words in said.items() if words == "promoted"]
    [loser] = set(rivals) - {winner}
    assert f"{winner} has taken charge meanwhile (promote by training at" in said[loser]
    assert f"{first} was judged against: nothing was changed" in said[loser]
    assert registry.champion("runtime") == winner
    assert [item["version"] for item in registry.history("runtime")] == [first, winner]
    with pytest.raises(ChampionChangedError, match="the baseline was judged against"):
        registry.withdraw("runtime", "worse", expected=None)
    assert registry.champion("runtime") == winner
    registry.withdraw("runtime", "worse", expected=winner)
    registry.promote("runtime", loser, "better than the baseline", expected=None)
    assert registry.champion("runtime") == loser


# Dies before the n-th file that is opened for writing or renamed, as by `kill -9`.
_KILLED = """
import os, signal, sys
from pathlib import Path
from models.registry import Registry
left = int(sys.argv[3])
def watch(event, arguments):
    global left
    if event == "os.rename" or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
Registry(Path(sys.argv[1])).promote("runtime", sys.argv[2], "better")
"""


def test_a_promotion_killed_at_any_point_leaves_the_old_or_the_new_champion_whole(registry):
    oldest, old = _champions(registry, 2)
    new = _save(registry, 5, b"new")
    seen = []
    for point in itertools.count(1):
        killed = subprocess.run(
            [sys.executable, "-c", _KILLED, registry.root, new, str(point)], cwd=ROOT, check=False, capture_output=True
        )
        champion = registry.load("runtime").version
        seen.append(champion)
        assert champion in (old, new)
        assert [item["version"] for item in registry.history("runtime")][-1] == champion
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        if champion == new:  # the way back leads to the old one, as it would have without the kill
            assert registry.rollback("runtime", "test") == old
        assert registry.champion("runtime") == old
    assert set(seen) == {old, new}
    assert seen.count(new) > 1, "one kill came after the champion had changed"
    assert registry.rollback("runtime", "test") == old
    assert registry.rollback("runtime", "test") == oldest


def test_code_revision_reads_branch_packed_and_detached_heads(tmp_path):
    assert code_revision(tmp_path) is None
    git = tmp_path / ".git"
    git.mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\nabc refs/heads/main\n")
    assert code_revision(tmp_path) == "abc"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "main").write_text("def\n")
    assert code_revision(tmp_path) == "def"
    (git / "HEAD").write_text("123\n")
    assert code_revision(tmp_path) == "123"
