"""Power throttle and stragglers of single GPUs: what their distances lean on, and that every list knows every class."""

from dataclasses import fields
from pathlib import Path
from typing import get_args

import numpy as np
import polars as pl
import pytest

from dashboards.theme import LIGHT, Theme
from dashboards.words import CLASS_WORDS
from features.classes import CLASSES, GPU_CLASSES
from features.conditions import DISTANCE, INDEX
from features.gangs import FRESH_S, Gangs, rank_steps
from features.history import SampleHistory
from features.job_state import CLOCK_WARMUP_S, JobState
from features.labels import GPU_CLASSES as LABELLED
from features.labels import label_bottlenecks
from features.peers import NEAR
from features.telemetry import RingWindow
from features.windows import FEATURES, JOB_WINDOW, SCREEN, TOLERANCE, FeatureBlock
from models.bottleneck import USED
from models.trend import COURSES
from pipelines import event_backtesting
from scheduler_hints.cause_words import WHAT
from scheduler_hints.causes import RARITY
from scheduler_hints.reasons import reason
from scheduler_hints.schema import BottleneckClass
from tests.gpu_samples import BOOK, at, frame, gang


def test_every_list_knows_every_class_of_gpus():
    for known in (DISTANCE, NEAR, SCREEN, TOLERANCE, JOB_WINDOW, COURSES, USED, WHAT, RARITY, CLASS_WORDS,
                  event_backtesting.CLASSES):  # fmt: skip
        assert set(CLASSES) <= set(known), sorted(known)
    assert set(CLASSES) == set(GPU_CLASSES) == set(LABELLED)
    assert set(CLASSES) <= set(get_args(BottleneckClass))
    colours = {getattr(LIGHT, name) for name in CLASSES}
    assert len(colours) == len(CLASSES)
    assert set(CLASSES) <= {field.name for field in fields(Theme)}
    assets = Path(__file__).parent.parent / "dashboards" / "assets"
    style = (assets / "weatherglass.css").read_text()
    for name in CLASSES:
        rule = style.split(f".icon-{name} ")[1].split("}")[0]
        assert (assets / rule.split("url(")[1].split(")")[0]).exists()


# --- gangs ------------------------------------------------------------------------------------------------


def by_hand(ts, gpu, code, step):
    """Median of each row's gang at its second, one row at a time."""
    out = np.full(len(ts), np.nan)
    second = np.floor(ts)
    for i in np.flatnonzero(code >= 0):
        newest = {}
        for k in np.flatnonzero((code >= 0) & (second <= second[i])):
            newest[gpu[k]] = max(newest.get(gpu[k], k), k, key=lambda row: ts[row])
        mine = [step[k] for k in newest.values() if code[k] == code[i] and ts[k] > second[i] - FRESH_S]
        out[i] = np.median(mine) if len(mine) >= 3 else np.nan
    return out


def test_medians_of_gangs_against_brute_force():
    rng = np.random.default_rng(1)
    rows = 240
    gpu = np.sort(rng.integers(0, 9, rows))
    ts = np.concatenate([np.sort(rng.choice(900, (gpu == g).sum(), replace=False)) for g in range(9)]) + rng.random(
        rows
    )
    job = np.where(rng.random(rows) < 0.05, -1, np.where(ts < 500, 0, gpu % 2))
    step = np.where(rng.random(rows) < 0.1, np.nan, rng.uniform(0.5, 2, rows)).astype(np.float32)
    absent = np.full(rows, np.nan, dtype=np.float32)
    known, code = rank_steps({"own_step_time_s": absent, "step_time_s": step}, job)
    got = Gangs(9).medians(gpu, ts, code, known)
    want = by_hand(ts, gpu, code, known)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert np.isfinite(want).sum() > 100
    # One second after the other gives the same.
    again, gangs = np.full(rows, np.nan), Gangs(9)
    for second in np.unique(np.floor(ts)):
        now = np.flatnonzero(np.floor(ts) == second)
        again[now] = gangs.medians(gpu[now], ts[now], code[now], known[now])
    np.testing.assert_array_equal(again, got)


def test_gangs_keep_their_ranks_when_jobs_are_renamed_and_gpus_forgotten():
    gangs = Gangs(4)
    gpu, ts = np.arange(4), np.full(4, 100.0)
    step = np.array([1, 1.1, 1.2, 5], dtype=np.float32)
    gangs.medians(gpu, ts, np.array([6, 6, 6, 9]), step)  # job 3 without own steps, job 4 with them
    gangs.rename(4, np.array([1, 3]))  # job 4 is gone
    assert gangs.gang.tolist() == [2, 2, 2, -1]
    assert gangs.median_of(np.array([2, 9]), 101.0) == pytest.approx([1.1, np.nan], nan_ok=True)
    gangs.clear(np.array([0]))
    assert np.isnan(gangs.median_of(np.array([2]), 101.0)).all()  # two ranks cannot say who is slow


def lagging(own: bool) -> dict:
    """A synchronous gang whose sixth rank needs ever more of each step from the 600th second on."""
    arrays = gang()
    shape = arrays["gpu_temp_c"].shape
    needs = np.full(shape, 0.8) + np.random.default_rng(5).normal(0, 0.005, shape)
    needs[40:60, 5] *= np.linspace(1.05, 1.8, 20)
    arrays["step_time_s"] = np.tile(np.maximum(needs.max(axis=1), 1.0)[:, None], shape[1])
    if own:
        arrays["own_step_time_s"] = needs
    return arrays


def test_only_own_steps_tell_a_slow_rank_of_a_synchronous_gang():
    silent = SampleHistory(frame(lagging(own=False)), BOOK)
    assert (silent.distance("straggler") > 0.25).all()
    history = SampleHistory(frame(lagging(own=True)), BOOK)
    found = label_bottlenecks(history, None, BOOK).filter(pl.col("bottleneck_class") == "straggler")
    assert found["gpu_uuid"].to_list() == ["GPU-0005"]
    assert at(690) <= found["onset_time"][0] <= at(735)
    none = SampleHistory(frame(lagging(own=True), drop=("own_step_time_s", "step_time_s")), BOOK)
    assert np.isnan(none.distance("straggler")).all()  # absent is unknown, not clear
    few = {name: value if name == "ts" else value[:, :2] for name, value in lagging(own=True).items()}
    assert np.isnan(SampleHistory(frame(few), BOOK).distance("straggler")).all()


def test_ranks_that_report_what_they_needed_are_not_compared_with_those_that_do_not():
    arrays = lagging(own=True)
    arrays["own_step_time_s"][:, :4] = np.nan
    history = SampleHistory(frame(arrays), BOOK)
    found = label_bottlenecks(history, None, BOOK)
    assert found["gpu_uuid"].to_list() == ["GPU-0005"]


def test_a_live_ring_sets_what_is_labelled():
    arrays = lagging(own=True)
    arrays["is_power_brake"] = np.zeros(arrays["gpu_temp_c"].shape, dtype=bool)
    arrays["is_power_brake"][80:90, 2] = True
    rows = frame(arrays)
    labels = label_bottlenecks(rows, None, BOOK)
    assert sorted(labels["bottleneck_class"]) == ["power_throttle", "straggler"]
    ring, was_set = RingWindow(BOOK), set()
    for (ts,), part in rows.partition_by("ts", as_dict=True, maintain_order=True).items():
        ring.observe(part)
        for name in CLASSES:
            was_set |= {(name, ring.uuids[gpu], ts) for gpu in np.flatnonzero(ring.is_set(name))}
    for uuid, name, onset, clear in labels.select("gpu_uuid", "bottleneck_class", "onset_time", "clear_time").rows():
        inside = {ts for klass, gpu, ts in was_set if (klass, gpu) == (name, uuid)}
        # The live loop waits for a second sample; the last one set is the last before the label clears.
        assert (min(inside), max(inside)) == (onset + (at(15) - at(0)), clear - (at(15) - at(0)))
    assert {(klass, gpu) for klass, gpu, _ in was_set} == set(labels.select("bottleneck_class", "gpu_uuid").rows())


# --- clocks -----------------------------------------------------------------------------------------------


def test_the_clock_a_job_is_used_to():
    state = JobState(1)
    gpu, nan = np.array([0]), np.array([np.nan], dtype=np.float32)

    def ratio(t, ghz, *, job=1, activity=0.9, is_held=False):
        clock, when = np.array([ghz * 1e9], dtype=np.float32), np.array([float(t)])
        state.update(gpu, when, np.array([job]), nan, nan, nan, nan)
        found = state.clock_ratio(gpu, clock)[0]
        state.learn_clock(gpu, when, clock, np.array([activity], dtype=np.float32), np.array([is_held]))
        return found

    for t in range(0, 300, 15):
        assert ratio(t, 1.98, activity=0.0) == 1  # loading at full clock is not what it is used to
    assert ratio(300, 1.4) == 1
    for t in range(315, 1500, 15):
        ratio(t, 1.4 + 0.04 * (t // 15 % 3 - 1))
    assert ratio(1500, 1.4) == pytest.approx(1.0, abs=0.01)
    for t in range(1515, 3315, 15):
        last = ratio(t, 0.7, is_held=True)
    assert last == pytest.approx(0.5, abs=0.01)  # half an hour on the brake
    for t in range(3315, 3315 + 3 * 3600, 15):
        last = ratio(t, 1.2)
    assert last == pytest.approx(1.0, abs=0.05)  # another phase of the same job
    assert ratio(20_000, 1.0, job=2) == 1
    assert np.isnan(ratio(20_015, 1.0, job=-1))
    assert CLOCK_WARMUP_S > 0


def test_reasons_name_power_and_gang():
    matrix = np.full((1, len(FEATURES)), np.nan, dtype=np.float32)
    for name, value in {
        "last": 0.07,
        "slope_short": -0.001,
        "gpu_power_w_last": 512,
        "sm_clock_hz_last": 1.31e9,
    }.items():
        matrix[0, FEATURES.index(name)] = value
    said = {
        name: reason(FeatureBlock(name, np.zeros(1, np.int64), np.zeros(1), matrix), 0, is_active=False)
        for name in ("power_throttle", "straggler")
    }
    assert said["power_throttle"] == "7% of its usual clock above being held back, 1.31 GHz at 512 W, -6%/min"
    assert said["straggler"] == "steps take 1.23 × the gang's, +0.06/min"
    matrix[0, FEATURES.index("slope_short")] = 1e-6
    still = [
        reason(FeatureBlock(name, np.zeros(1, np.int64), np.zeros(1), matrix), 0, is_active=False).rsplit(", ", 1)[1]
        for name in ("thermal_throttle", "nvlink_saturation", "power_throttle", "straggler", "memory_exhaustion")
    ]
    assert still == ["+0.0 °C/min", "+0%/min", "+0%/min", "+0.00/min", "+0.00 GiB/min"]
    assert set(INDEX) >= set(DISTANCE.values())
