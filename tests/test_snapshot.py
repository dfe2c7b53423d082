"""Snapshot files: atomic, versioned, and expired exactly when they should be."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_hints import snapshot
from scheduler_hints.schema import SHAPES, Snapshot
from scheduler_hints.snapshot import Publisher, SnapshotError, expires_in_s, parse_snapshot, read_snapshot
from tests.hints_support import ROOT, again, bottleneck, demand, job, plan, publish, risk, window

SAMPLES = {
    "bottlenecks": bottleneck(), "backfill-windows": window(), "node-risks": risk(), "jobs": job(),
    "reservation-plans": plan(), "demand": demand(),
}  # fmt: skip


def _sample(**changes: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "schema_version": 1, "kind": "bottlenecks", "cluster": "alpha", "version": 1, "ttl_s": 30.0, "data_age_s": 1.0,
        "generated_at": datetime(2026, 3, 14, tzinfo=UTC), "actionable_horizon_s": None, "model_versions": {},
        "boot_id": snapshot.boot_id(), "generated_boottime_s": 1000.0, "items": [],
    }  # fmt: skip
    return Snapshot(**(fields | changes))


@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_every_kind_is_read_back_as_it_was_published(tmp_path: Path, kind: Any) -> None:
    sent = Publisher(tmp_path, "alpha").publish(
        kind, [SAMPLES[kind]], ttl_s=5, data_age_s=1, model_versions={"runtime": "m1"}, actionable_horizon_s=60
    )
    found = read_snapshot(tmp_path / "alpha" / f"{kind}.json")
    assert msgspec.json.decode(found.items[0], type=SHAPES[kind]) == SAMPLES[kind]
    assert msgspec.structs.replace(found, items=[]) == msgspec.structs.replace(sent, items=[])
    assert 4 < expires_in_s(found) <= 5


def test_versions_rise_over_restarts_and_over_two_writers(tmp_path: Path) -> None:
    first, second = publish(tmp_path, bottlenecks=[]), Publisher(tmp_path, "alpha")
    path = tmp_path / "alpha" / "bottlenecks.json"
    versions = [read_snapshot(path).version]
    for writer in (second, first, first, second, Publisher(tmp_path, "alpha"), second):
        versions.append(again(writer, "bottlenecks", []).version)
    assert versions == list(range(versions[0], versions[0] + len(versions)))
    time.sleep(0.02)  # without a file to go on, versions follow the clock: faster than one a ms they could not
    path.write_bytes(b"garbage")
    assert again(Publisher(tmp_path, "alpha"), "bottlenecks", []).version > versions[-1]
    path.unlink()
    assert again(first, "bottlenecks", []).version > versions[-2]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"ttl_s": math.nan}, "ttl_s"),
        ({"ttl_s": 0.0}, "ttl_s"),
        ({"ttl_s": math.inf}, "ttl_s"),
        ({"data_age_s": math.nan}, "data_age_s"),
        ({"actionable_horizon_s": math.inf}, "actionable_horizon_s"),
        ({"kind": "bottleneck"}, "no kind 'bottleneck'; kinds: bottlenecks"),
    ],
)
def test_what_readers_would_refuse_is_not_published(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    publisher = publish(tmp_path, bottlenecks=[bottleneck()])
    path = tmp_path / "alpha" / "bottlenecks.json"
    before = path.read_bytes()
    fields: dict[str, Any] = {"kind": "bottlenecks", "items": [], "ttl_s": 5, "data_age_s": 1, "model_versions": {}}
    with pytest.raises(ValueError, match=words):
        publisher.publish(**(fields | changes))
    assert path.read_bytes() == before


def test_an_item_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="an item of bottlenecks is a Window, not a Bottleneck"):
        publish(tmp_path, bottlenecks=[bottleneck(), window()])


def test_a_wall_clock_step_changes_nothing_on_the_same_boot() -> None:
    found = _sample()
    for step in (timedelta(days=-400), timedelta(0), timedelta(days=400)):
        assert expires_in_s(found, found.generated_at + step, 1010.0) == 20.0
        assert expires_in_s(found, found.generated_at + step, 1031.0) == -1.0


def test_another_boot_is_judged_by_the_wall_clock_and_never_beyond_its_time_to_live() -> None:
    found = _sample(boot_id="another")
    at = found.generated_at
    assert expires_in_s(found, at + timedelta(seconds=10), 5e9) == 20.0
    assert expires_in_s(found, at + timedelta(seconds=40), 0.0) == -10.0
    assert expires_in_s(found, at - timedelta(seconds=3), 0.0) == 30.0  # a little ahead: no longer than ttl_s
    assert expires_in_s(found, at - timedelta(seconds=60), 0.0) < 0  # far ahead: its age is unknown


def test_a_boot_id_that_is_unknown_never_counts_as_the_same() -> None:
    found = _sample(boot_id="", generated_boottime_s=snapshot.boottime_s())
    assert expires_in_s(found) < 0


def test_a_snapshot_from_the_future_of_this_boot_is_not_believed() -> None:
    assert expires_in_s(_sample(generated_boottime_s=2000.0), None, 1000.0) < 0


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"schema_version": 2}, "schema_version 2, this program reads 1"),
        ({"ttl_s": 0.0}, "ttl_s"),
        ({"ttl_s": 1e12}, "ttl_s"),
        ({"generated_at": datetime(2026, 3, 14)}, "no time zone"),  # noqa: DTZ001
    ],
)
def test_a_snapshot_that_cannot_be_judged_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SnapshotError, match=f"x.json: .*{words}"):
        parse_snapshot(msgspec.json.encode(_sample(**changes)), "x.json")


def test_a_later_format_is_named_even_when_its_fields_differ() -> None:
    with pytest.raises(SnapshotError, match="schema_version 7, this program reads 1"):
        parse_snapshot(b'{"schema_version": 7, "payload": "?"}', "x.json")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_damage_to_a_file_goes_beyond_a_snapshot_error(data: st.DataObject) -> None:
    whole = msgspec.json.encode(_sample(items=[msgspec.Raw(msgspec.json.encode(bottleneck()))]))
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    damaged = whole[:start] + data.draw(st.binary(max_size=8)) + whole[stop:]
    with contextlib.suppress(SnapshotError):
        parse_snapshot(damaged, "x.json")


def test_unreadable_is_an_error_that_names_the_file_and_missing_is_not(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_snapshot(tmp_path / "none.json")
    with pytest.raises(SnapshotError, match="cannot be read"):
        read_snapshot(tmp_path)


def test_readers_see_whole_files_while_writers_replace_them(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = {bytes([65 + n]) * (1000 + 5000 * n) for n in range(4)}
    snapshot.write_atomically(path, min(contents))
    done = threading.Event()

    def write(content: bytes) -> None:
        for _ in range(60):
            snapshot.write_atomically(path, content, durable=False)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    seen: set[bytes] = set()

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert seen <= contents
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    snapshot.write_atomically(path, b"old")
    with pytest.raises(TypeError):
        snapshot.write_atomically(path, "not bytes")  # type: ignore[arg-type]  # ty: ignore[invalid-argument-type]
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_a_full_disk_keeps_the_old_snapshot_and_its_version(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel refuse the write in the middle, as a full disk does."""
    script = """
import resource, signal, sys
from pathlib import Path
from tests.hints_support import publish, again, bottleneck
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
root = Path(sys.argv[1])
publisher = publish(root, bottlenecks=[])
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    again(publisher, "bottlenecks", [bottleneck(f"b{n}") for n in range(100)])
except OSError as error:
    print("refused", error.errno)
print(again(publisher, "bottlenecks", []).version)
"""
    found = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    refused, version = found.stdout.split("\n")[:2]
    assert refused == "refused 27"
    assert read_snapshot(tmp_path / "alpha" / "bottlenecks.json").version == int(version)
    assert [entry.name for entry in (tmp_path / "alpha").iterdir()] == ["bottlenecks.json"]


def test_what_a_killed_writer_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "alpha"
    folder.mkdir()
    dead = subprocess.Popen(["true"])
    dead.wait()
    (folder / f".bottlenecks.json.{dead.pid}.3.tmp").write_bytes(b"half")
    (folder / f".bottlenecks.json.{os.getpid()}.3.tmp").write_bytes(b"being written")
    (folder / ".other.tmp").write_bytes(b"not ours")
    Publisher(tmp_path, "alpha")
    assert sorted(entry.name for entry in folder.iterdir()) == [
        f".bottlenecks.json.{os.getpid()}.3.tmp",
        ".other.tmp",
    ]
