"""Device memory requested against used: which jobs are judged, by what peak, and what would hold them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner

from features.memory_use import PEAKS, memory_by_family, memory_of_jobs, smallest_share
from features.vocabulary import conform
from models.memory import estimate
from models.memory_descriptions import descriptions_of, with_estimates
from models.memory_inputs import Training
from pipelines.compose import CommandError
from pipelines.memory_report import read_descriptions, read_memory_use
from pipelines.settings import load_settings
from pipelines.store import Store
from weatherglass import cli

GIB = 2**30
END = datetime(2026, 3, 14, tzinfo=UTC)
BEGIN = END - timedelta(days=7)


def a_job(job_id: str, gpus: int = 1, hours: float = 10, name: str = "train_1", **changes: Any) -> dict[str, Any]:
    start = END - timedelta(hours=hours + 1)
    return {
        "cluster": "alpha", "job_id": job_id, "submit_time": start, "user": "ada", "name": name, "gpus": gpus,
        "state": "COMPLETED", "start_time": start, "end_time": start + timedelta(hours=hours),
    } | changes  # fmt: skip


def a_peak(job_id: str, gib: float, gpu: str = "g0", capacity_gib: float | None = 80, samples: int = 100) -> tuple:
    return (job_id, "n1", gpu, gib * GIB, None if capacity_gib is None else capacity_gib * GIB, samples)


def judge(peaks: list[tuple], *jobs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    frame = pl.DataFrame(peaks, schema=dict(PEAKS), orient="row")
    found = memory_of_jobs(frame, conform(pl.DataFrame(jobs), "core_jobs"), BEGIN, END)
    return {row["job_id"]: row for row in found.iter_rows(named=True)}


def test_a_job_is_judged_by_its_fullest_gpu() -> None:
    found = judge([a_peak("1", 10, "g0"), a_peak("1", 30, "g1")], a_job("1", gpus=2))["1"]
    assert found["peak_bytes"] == 30 * GIB
    assert found["used_ratio"] == pytest.approx(30 / 80)
    assert found["share"] == 0.5
    assert found["gpu_hours"] == pytest.approx(20)
    assert found["family"] == "train_#"


def test_what_is_not_known_is_null_and_never_zero() -> None:
    found = judge(
        [a_peak("few", 5, samples=2), a_peak("half", 5), a_peak("blind", 5, capacity_gib=None), a_peak("ghost", 5)],
        a_job("few"), a_job("half", gpus=2), a_job("blind"), a_job("unseen"), a_job("cpu", gpus=0),
    )  # fmt: skip
    assert set(found) == {"few", "half", "blind", "unseen"}
    assert [found[name]["peak_bytes"] for name in ("few", "half", "unseen")] == [None] * 3
    assert found["blind"]["peak_bytes"] == 5 * GIB
    assert all(row["used_ratio"] is None and row["share"] is None for row in found.values())


def test_hours_are_those_within_the_span_and_of_one_id_the_newest_counts() -> None:
    old = a_job("1", user="eve", submit_time=BEGIN - timedelta(days=60))
    long = a_job("1", start_time=BEGIN - timedelta(days=30), end_time=None, state="RUNNING")
    found = judge([a_peak("1", 5)], old, long)["1"]
    assert found["user"] == "ada"
    assert found["gpu_hours"] == pytest.approx(7 * 24)


def test_slices_hold_the_peak_with_headroom() -> None:
    used = [0.0, 0.113, 0.114, 0.227, 0.228, 0.454, 0.455, 0.95, 1.0, None]
    shares = pl.DataFrame({"r": used}).select(smallest_share(pl.col("r"))).to_series().to_list()
    assert shares == [0.125, 0.125, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0, 1.0, None]


def test_a_family_is_judged_by_its_hungriest_job() -> None:
    peaks = [a_peak("1", 5), a_peak("2", 60, "g1"), a_peak("3", 8, "g2"), a_peak("4", 70, "g3")]
    jobs = [
        a_job("1", name="train_1"), a_job("2", name="train_22"), a_job("3", name="eval", hours=100),
        a_job("4", name="eval", user="bob"), a_job("5", name="train_5"), a_job("6", name="unseen"),
    ]  # fmt: skip
    frame = pl.DataFrame(peaks, schema=dict(PEAKS), orient="row")
    of_jobs = memory_of_jobs(frame, conform(pl.DataFrame(jobs), "core_jobs"), BEGIN, END)
    rows = memory_by_family(of_jobs).to_dicts()
    assert [(row["user"], row["family"]) for row in rows] == [("ada", "eval"), ("ada", "train_#"), ("bob", "eval")]
    ada, train, bob = rows
    assert (ada["share"], train["share"], bob["share"]) == (0.125, 1.0, 1.0)
    assert (train["jobs"], train["judged"], train["gpu_hours"]) == (3, 2, pytest.approx(20))
    assert ada["idle_gpu_hours"] == pytest.approx(100 * 0.9)
    assert train["peak_bytes"] == 60 * GIB


LLAMA = {"layers": 8, "hidden": 1024, "heads": 8, "vocab": 32000, "seq": 1024}


def test_descriptions_let_the_estimator_speak_of_jobs() -> None:
    blocks = [
        {"name": "TRAIN_?", "user": "a*", "zero_stage": 3, "tensor_parallel": 2, **LLAMA},
        {"name": "train_*", "experts": 8, "expert_parallel": 4, "data_parallel": 4, **LLAMA}, {"name": "big", **LLAMA},
    ]  # fmt: skip
    described = descriptions_of({"model": blocks})
    jobs = [
        a_job("1", gpus=8), a_job("2", gpus=4, user="bob"), a_job("3", gpus=3), a_job("4", gpus=8, user="bob"),
        a_job("5", name="other"), a_job("6", name=None), a_job("7", gpus=16, name="BIG"),
    ]  # fmt: skip
    frame = memory_of_jobs(pl.DataFrame(schema=dict(PEAKS)), conform(pl.DataFrame(jobs), "core_jobs"), BEGIN, END)
    found = {row["job_id"]: row for row in with_estimates(frame, described).iter_rows(named=True)}

    def needed(**inputs: Any) -> float:
        return float(estimate(Training(**LLAMA, **inputs)).total_bytes)

    assert found["1"]["estimated_bytes"] == needed(zero_stage=3, tensor_parallel=2, data_parallel=4)
    assert found["2"]["estimated_bytes"] == needed(experts=8, expert_parallel=4, data_parallel=4)
    assert found["7"]["estimated_bytes"] == needed(data_parallel=16)
    is_known = {name: (row["is_described"], row["estimated_bytes"] is not None) for name, row in found.items()}
    assert is_known["3"] == (True, False), "two GPUs that share layers do not make three"
    assert is_known["4"] == (True, False)
    assert is_known["5"] == is_known["6"] == (False, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["[[model]]"]),
        ("[model]\nname = 'x'", ["[[model]]"]),
        ("[[model]]\nname = 'x'\nlayer = 8", ["number 1", "'layer'", "layers"]),
        ("[[model]]\nname = 'x'\nlayers = 8", ["number 1", "hidden, heads, vocab, seq"]),
        ("[[model]]\nname = 3\nlayers = 8\nhidden = 64\nheads = 8\nvocab = 9\nseq = 9", ["name=3", "pattern"]),
        ("[[model]]\nname = 'x'\nlayers = 8\nhidden = 64\nheads = 7\nvocab = 9\nseq = 9", ["heads=7", "divisor"]),
        ("[[model]]\nname = 'x'\nlayers = 'a'\nhidden = 64\nheads = 8\nvocab = 9\nseq = 9", ["layers='a'"]),
        ("name = ", ["models.toml"]),
    ],
)
def test_a_wrong_description_is_named_with_the_choices(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(CommandError) as caught:
        read_descriptions(path)
    assert all(word in str(caught.value) for word in ["models.toml", *words]), caught.value


def sample(minute: int, used_gib: float, gpu: str, job: str | None) -> dict[str, Any]:
    return {
        "ts": END - timedelta(hours=3) + timedelta(minutes=minute), "cluster": "alpha", "node": "n1", "gpu_uuid": gpu,
        "job_id": job, "fb_used_bytes": used_gib * GIB, "fb_total_bytes": 80.0 * GIB,
    }  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "w.toml"
    path.write_text(f'state_dir = "{tmp_path}/state"\n[clusters.alpha]\n')
    monkeypatch.setenv("WEATHERGLASS_CONFIG", str(path))
    return str(path)


def test_samples_belong_to_who_held_the_gpu_and_the_command_says_so(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = END - timedelta(hours=3)
    held = [
        {"gpu_uuid": "a", "job_id": "1", "start_time": begin, "end_time": begin + timedelta(minutes=10)},
        {"gpu_uuid": "b", "job_id": "2", "start_time": begin, "end_time": None, "is_shared": True},
    ]
    intervals = pl.DataFrame([{"cluster": "alpha", "node": "n1", "is_shared": False, **row} for row in held])
    samples = [
        *(sample(minute, 6 if minute < 10 else 70, "a", None) for minute in range(20)),  # 70 GiB are of no job
        *(sample(minute, 50, "b", None) for minute in range(20)),  # shared: whose, no one knows
        *(sample(minute, 20 + minute, "c", "3") for minute in range(20)),  # only its own labels name the job
        sample(5, 79, "c", "3") | {"ts": END - timedelta(days=30)},  # before the span
    ]
    jobs = [
        a_job("1", start_time=begin, end_time=begin + timedelta(minutes=10), name="small"),
        a_job("2", start_time=begin, end_time=None, state="RUNNING", name="shared"),
        a_job("3", start_time=begin, end_time=begin + timedelta(hours=2), name="big_3"),
    ]
    settings = load_settings(config)
    with Store.open(settings.store_url, settings.store_data_path) as store:
        for table, frame in (("core_gpu_samples", pl.DataFrame(samples)), ("core_gpu_jobs", intervals),
                             ("core_jobs", pl.DataFrame(jobs))):  # fmt: skip
            rows = conform(frame, table)
            store.transact(lambda writer, table=table, rows=rows: writer.upsert(table, rows))
        with store.reader() as reader:
            found = {row["job_id"]: row for row in read_memory_use(reader, "alpha", BEGIN, END).to_dicts()}
    assert found["1"]["peak_bytes"] == 6 * GIB
    assert found["2"]["peak_bytes"] is None
    assert found["3"]["peak_bytes"] == 39 * GIB
    assert (found["1"]["share"], found["3"]["share"]) == (0.125, 1.0)

    days = f"{(datetime.now(UTC) - BEGIN).days + 1}d"
    done = CliRunner().invoke(cli, ["memory-use", "--since", days])
    assert done.exit_code == 0, done.output
    assert "3 jobs with GPUs" in done.output
    assert "memory of 2 of them known" in done.output
    assert "1/8: 10 GiB, as a MIG slice" in done.output
    read = json.loads(CliRunner().invoke(cli, ["memory-use", "--since", days, "--json"]).output)
    assert [row["family"] for row in read[0]["families"]] == ["big_#", "small"]

    models = tmp_path / "models.toml"
    inputs = "\n".join(f"{name} = {value}" for name, value in LLAMA.items())
    models.write_text(f'[[model]]\nname = "big_*"\n{inputs}\n[[model]]\nname = "unseen"\n{inputs}\n')
    needed = estimate(Training(**LLAMA)).total_bytes
    done = CliRunner().invoke(cli, ["memory-use", "--since", days, "--models", str(models)])
    assert done.exit_code == 0, done.output
    assert "1 job described, 1 of them estimated; estimated ÷ used, of 1 job: median " in done.output
    [line] = [line for line in done.output.splitlines() if "big_#" in line]
    assert f"39.0 GiB    80.0 GiB {needed / GIB:>7.1f} GiB" in line
    [line] = [line for line in done.output.splitlines() if " small " in line]
    assert " ? " in line
    read = json.loads(
        CliRunner().invoke(cli, ["memory-use", "--since", days, "--json", "--models", str(models)]).output
    )
    assert read[0]["estimates"]["estimated_to_used_q50"] == pytest.approx(needed / (39 * GIB))
    assert [row["estimated_bytes"] for row in read[0]["families"]] == [needed, None]
