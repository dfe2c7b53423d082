"""Import of saved Prometheus answers: one bad value costs itself, and a large answer is read in bounded pieces."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from polars.testing import assert_frame_equal

from pipelines.importing import import_files
from pipelines.imports import ImportingError, Task, ranges
from pipelines.imports.prometheus_json import read_answers
from pipelines.imports.report import Report
from pipelines.imports.targets import ParquetTarget
from weatherglass import cli

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
T0 = datetime(2026, 11, 30, 10, tzinfo=UTC)
EPOCH = round(T0.timestamp())


def run(path: Path, tmp_path: Path) -> tuple[Report, pl.DataFrame]:
    out = tmp_path / "out" / "out.parquet"
    out.parent.mkdir(exist_ok=True)
    out.unlink(missing_ok=True)
    target = ParquetTarget(out)
    try:
        report = import_files("prometheus-json", path, "c", target, out.parent, now=NOW)
    finally:
        target.close()
    return report, pl.read_parquet(out) if out.exists() else pl.DataFrame()


def series(name: str, gpu: int, values: list[Any]) -> dict[str, Any]:
    labels = {"__name__": f"DCGM_FI_DEV_{name}", "gpu": str(gpu), "UUID": f"GPU-{gpu}", "Hostname": "n1", "job": "d"}
    return {"metric": labels, "values": values}


def save(path: Path, result: list[Any], separators: tuple[str, str] = (",", ":")) -> Path:
    body = {"status": "success", "data": {"resultType": "matrix", "result": result}}
    path.write_text(json.dumps(body, separators=separators) + "\n")
    return path


def pieces_of(path: Path) -> list[dict[str, pl.DataFrame]]:
    return list(read_answers(Task("prometheus-json", (path,), "c", NOW, Report("a", "prometheus-json", "c"))))


BAD: list[Any] = [
    None,
    ["x", "y"],
    [EPOCH, None],
    [EPOCH, "hot"],
    [EPOCH],
    [EPOCH, "1", "2"],
    7,
    {"a": [1]},
    [[1], "2"],
]


@pytest.mark.parametrize("bad", BAD, ids=json.dumps)
def test_a_bad_pair_costs_no_good_one(bad: Any, tmp_path: Path) -> None:
    good = [[EPOCH + 15 * i, str(40 + i)] for i in range(6)]
    result = [series("GPU_TEMP", 0, good), series("GPU_TEMP", 1, [*good[:3], bad, *good[3:], bad])]
    report, frame = run(save(tmp_path / "a.json", result), tmp_path)
    for gpu in ("GPU-0", "GPU-1"):
        assert frame.filter(pl.col("gpu_uuid") == gpu)["gpu_temp_c"].to_list() == [40.0, 41.0, 42.0, 43.0, 44.0, 45.0]
    (tally,) = report.dropped.values()
    assert (tally.count, tally.places, tally.example) == (2, [2], json.dumps(bad, separators=(",", ":")))


@pytest.mark.parametrize("separators", [(",", ":"), (" , ", " : ")])
@pytest.mark.parametrize("is_bad", [False, True])
def test_pieces_and_slices_change_nothing(
    separators: tuple[str, str], is_bad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = [EPOCH + 15 * i for i in range(200)]
    result = [
        series("GPU_TEMP", 0, [[t, str(40 + i % 9)] for i, t in enumerate(at)]),
        series("NVLINK_COUNT_TX_BYTES", 0, [[t, str(10**7 * i * (i + 9))] for i, t in enumerate(at)]),
        series("GPU_TEMP", 1, [[t, str(50 + i % 7)] for i, t in enumerate(at[100:])]),
        series("POWER_USAGE", 0, []),
        series("FB_USED", 1, [[at[150], "7"]]),
        {"metric": {"__name__": "go_goroutines"}, "values": [["no", "matter"]]},
    ]
    path = save(tmp_path / "a.json", result, separators)
    _, whole = run(path, tmp_path)
    assert (len(whole), whole["nvlink_tx_bytes_per_s"].count()) == (300, 199)
    bad = [["x", "y"], None] if is_bad else []
    for one in result[:3]:
        values: Any = one["values"]
        values[77:77] = bad
    save(path, result, separators)
    monkeypatch.setattr(ranges, "_PIECE", 500)
    monkeypatch.setattr(ranges, "_SLICE", 90)
    report, parts = run(path, tmp_path)
    assert_frame_equal(parts, whole)
    assert {reason: (tally.count, tally.places) for reason, tally in report.dropped.items()} == (
        {"values that are no pair of a time and a number": (6, [1, 2, 3])} if is_bad else {}
    )


def test_one_large_series_is_read_in_bounded_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.json", [series("GPU_TEMP", 0, [[EPOCH + i, str(i % 90)] for i in range(7000)])])
    monkeypatch.setattr(ranges, "_PIECE", 4000)
    monkeypatch.setattr(ranges, "_SLICE", 500)
    sizes: list[int] = []
    decode = ranges.decode_matrix
    monkeypatch.setattr(ranges, "decode_matrix", lambda text: (sizes.append(len(text)), decode(text))[1])
    rows = [len(piece["raw_gpu_samples"]) for piece in pieces_of(path)]
    assert max(sizes) < 4100
    assert max(rows) <= 600
    assert sum(rows) == 7000


def test_brackets_within_texts_are_no_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[Any] = [[EPOCH + i, str(i % 90)] for i in range(400)]
    values[200:200] = [[EPOCH, "]" + "[" * 300]]
    path = save(tmp_path / "a.json", [series("GPU_TEMP", 0, values)])
    for size in (100, 101, 102, 103):
        monkeypatch.setattr(ranges, "_PIECE", size)
        report, frame = run(path, tmp_path)
        assert len(frame) == 400
        assert [tally.count for tally in report.dropped.values()] == [1]


def test_an_answer_that_is_too_large_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.imports.prometheus_json.MAX_BYTES", 1 << 20)
    path = save(tmp_path / "a.json", [series("GPU_TEMP", 0, [[EPOCH + i, "40"] for i in range(60_000)])])
    report, _ = run(path, tmp_path)
    assert list(report.dropped) == ["an answer of more than 1 MiB: ask for a shorter range or for fewer series"]


def test_answers_without_series_and_empty_files_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    folder.mkdir()
    save(folder / "a.json", [])
    (folder / "b.json").touch()
    save(folder / "c.json", [series("GPU_TEMP", 0, [[EPOCH, "40"]])])
    report, frame = run(folder, tmp_path)
    assert frame["ts"].to_list() == [T0]
    assert any(text.startswith("a.json: a good answer that holds no series") for text in report.notes)
    assert [(reason, tally.example) for reason, tally in report.dropped.items()] == [
        ("a file that is empty: what asked for it failed", "b.json")
    ]
    command = ["import", "prometheus-json", str(folder / "a.json"), "--cluster", "c", "--out", str(tmp_path / "o")]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 1
    assert "a good answer that holds no series" in done.output
    with pytest.raises(ImportingError, match=r"b\.json: the file is empty"):
        run(folder / "b.json", tmp_path)
