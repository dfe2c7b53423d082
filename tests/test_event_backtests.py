"""Backtests of bottlenecks, levels and node faults: labels by hand, nothing from later, figures on recorded traces."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from sklearn.metrics import average_precision_score, roc_auc_score

from features.levels import LevelError, level_rows
from features.shortage import OccupancyError, QueueHistory
from features.straggler import TimelineError, slow_states, step_times
from models import straggler
from models.event_alarms import count_alarms
from models.event_report import finite
from models.event_scores import Judged, RankedRows, event_scores, horizon_name
from models.fault_backtest import FaultBacktestError, backtest_faults, faults_of
from models.gpu_onset_backtest import backtest_telemetry
from models.level_backtest import backtest_level
from models.onset_backtest import OnsetBacktestError, backtest_shortage, backtest_straggler, detection_steps
from models.shortage import ShortageForecaster, clear_rows
from pipelines.event_backtesting import (
    CLASSES,
    GPU_CLASSES,
    EventBacktestError,
    OutcomeError,
    read_record,
    run_event_backtest,
)
from weatherglass import cli

START = datetime(2026, 3, 2, tzinfo=UTC)


def occupancy(pending, idle, *, minutes=None, queue="q", step_s=60):
    minutes = range(len(pending)) if minutes is None else minutes
    return pl.DataFrame(
        {
            "ts": [START + timedelta(seconds=step_s * m) for m in minutes], "queue": queue, "cluster": "c",
            "total_gpu_num": 64, "running_gpu_num": [64 - i if i is not None else None for i in idle],
            "pending_gpu_num": pending, "running_gpujob_num": 3, "pending_gpujob_num": [1 if p else 0 for p in pending],
        },
        schema_overrides={"pending_gpu_num": pl.Int64, "running_gpu_num": pl.Int64},
    )  # fmt: skip


def busy_queues(queues=5, days=4, seed=0):
    """Queues that jobs arrive at; each is short now and then."""
    rng = np.random.default_rng(seed)
    frames = []
    for q in range(queues):
        running, pending, out = 0, 0, []
        for _ in range((days + 1) * 1440):
            running -= rng.binomial(running, 0.01)
            if rng.random() < 0.02 + 0.01 * q:
                pending += int(rng.choice([1, 8, 16, 32]))
            if pending <= 64 - running or rng.random() < 0.05:
                started = min(pending, 64 - running)
                running, pending = running + started, pending - started
            out.append((pending, 64 - running))
        out = out[1440:]  # the first day fills the queue
        frames.append(occupancy([p for p, _ in out], [i for _, i in out], queue=f"q{q}"))
    return pl.concat(frames)


@pytest.fixture(scope="module")
def queues():
    return busy_queues()


def test_shortage_sets_when_pending_gpus_exceed_idle_ones_and_holds():
    #          clear     onset       blip  level   known no more   set when first seen again
    pending = [0, 0, 0, 9, 9, 0, 0, 9, 0, 8, 8, 0, None, 9, 9, 0]
    history = QueueHistory(occupancy(pending, [8] * len(pending)))
    assert history.onset_row.tolist() == [3]
    assert history.state.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, -1, 1, 1, 0]
    onset_in, known = history.outcome(np.array([0, 2, 5, 11]), np.inf)
    assert onset_in.tolist() == [180.0, 60.0, np.inf, np.inf]
    assert known[3] == 30.0  # the next sample says nothing


def test_shortage_is_unknown_over_a_silence():
    minutes = [0, 1, 2, 3, 20, 21, 22]
    history = QueueHistory(occupancy([0, 0, 0, 0, 9, 9, 9], [8] * 7, minutes=minutes))
    assert history.onset_row.tolist() == []  # it came while nobody looked
    onset_in, known = history.outcome(np.array([0]), np.inf)
    assert (onset_in[0], known[0]) == (np.inf, 210.0)


def test_fast_samples_must_hold_ten_seconds():
    pending = [0, 0, 9, 9, 0, 0, 0, 0, 9, 9, 9, 9, 0]
    history = QueueHistory(occupancy(pending, [8] * 13, step_s=4))
    assert history.onset_row.tolist() == [8]


def test_shortage_features_know_nothing_later(queues):
    cut = START + timedelta(days=2)
    whole, part = QueueHistory(queues), QueueHistory(queues.filter(pl.col("ts") < cut))
    rows = np.flatnonzero(whole.ts < cut.timestamp())
    assert len(rows) == len(part.ts)
    for name, values in part.features.items():
        # An onset that the cut hides from sight had not held yet.
        np.testing.assert_allclose(whole.features[name][rows], values, rtol=1e-6, atol=1e-6, err_msg=name)


def test_shortage_backtest_writes_calibrated_rising_probabilities(queues, monkeypatch):
    monkeypatch.setattr("models.shortage.ROUNDS", 40)
    report = backtest_shortage(queues, seed=3)
    rows = report.predictions
    assert rows.columns == ["ts", "cluster", "node", "gpu_uuid", "horizon_s", "p_onset", "queue"]
    assert (rows["ts"] >= START + timedelta(days=0.7 * 4, minutes=-1)).all()
    wide = rows.pivot(on="horizon_s", index=["ts", "queue"], values="p_onset")
    assert (wide["120.0"] <= wide["300.0"]).all()
    assert report.train_end is not None
    assert report.train_end <= report.start - timedelta(seconds=300 + 3600)
    assert 0 < report.value("mean_p_5min") < 5 * report.value("base_rate_5min")
    assert report.value("auc_5min") > 0.6
    assert "no alarm" in report.notes[0]
    assert {row["worth"] for row in report.operating} >= {1, 10, 100}
    monkeypatch.setattr("models.shortage.SEEDS", 1)
    history = QueueHistory(queues)
    end = history.ts.min() + 3 * 86_400
    of = clear_rows(history, end, np.inf)
    once, again = (ShortageForecaster.fit(history, end, seed=5, seeds=1).forecast(history, of) for _ in range(2))
    assert np.array_equal(once, again)


def test_shortage_says_what_is_missing(queues):
    with pytest.raises(OccupancyError, match="lacks pending_gpu_num"):
        QueueHistory(queues.drop("pending_gpu_num"))
    with pytest.raises(OnsetBacktestError, match="0 onsets of shortage"):
        backtest_shortage(occupancy([0] * 2000, [8] * 2000))
    with pytest.raises(OnsetBacktestError, match="horizon 30 s is shorter than two samples"):
        backtest_shortage(queues, horizons_s=(30.0, 300.0))


@pytest.mark.traces
def test_labels_of_recorded_queues_equal_the_plain_rule(traces):
    rows = pl.read_parquet(traces / "occupancy" / "helios-earth-2020.parquet").filter(
        pl.col("ts") < datetime(2020, 5, 4, tzinfo=UTC)
    )
    short = pl.col("pending_gpu_num") > pl.col("idle_gpu_num")
    plain = rows.sort("queue", "ts").with_columns(short.alias("s"))
    s = pl.col("s")
    onset = s & ~s.shift(1).over("queue") & s.shift(-1).over("queue")
    assert len(QueueHistory(rows).onset_row) == plain.select(onset.fill_null(False).sum()).item() > 20


def timeline(ratios, *, clock=True):
    """A gang whose ranks take 1 s × their ratio in each step; shape (steps, ranks)."""
    rows = [
        {
            "rank": rank, "stage": 0, "step": step, "optype": op,
            "start_ts": 10.0 * step * clock + (op == "grad-reduce"),
            "duration": float(ratio) / 2 if op != "grad-reduce" else 3.0,
        }
        for step, row in enumerate(ratios)
        for rank, ratio in enumerate(row)
        for op in ("forward-compute", "backward-compute", "grad-reduce")
    ]  # fmt: skip
    return pl.DataFrame(rows)


def test_a_rank_is_slow_after_three_slow_steps_and_unknown_where_it_is_not_seen():
    log_ratio = np.log([[1.4, 1.0], [1.4, 1.0], [1.2, 1.4], [1.4, 1.4], [1.4, np.nan], [1.4, 1.4], [1.0, 1.4]])
    assert slow_states(log_ratio).T.tolist() == [[0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, -1, 0, 0]]


def test_stragglers_are_found_and_healthy_ranks_left_alone():
    rng = np.random.default_rng(4)
    ratios = np.exp(rng.normal(0, 0.03, (60, 8)))
    ratios[:, 1] *= 1.6  # from the first step on
    ratios[30:, 2] *= 1.5
    ratios[20, 3] *= 3.0  # one bad step is no straggler
    times = step_times(timeline(ratios))
    assert times.is_clock
    p = straggler.forecast(times)
    found = detection_steps(times, p)
    assert found.keys() == {1, 2}
    assert all(steps is not None and steps <= 4 for steps in found.values())
    assert p[:, 4:].max() < 0.05
    assert p[:, 3].max() < 0.5
    assert p[:29, 2].max() < 0.05
    early = straggler.forecast(step_times(timeline(ratios[:40])))
    np.testing.assert_array_equal(early, p[:40])


def test_timelines_say_what_is_missing():
    with pytest.raises(TimelineError, match="lacks optype"):
        step_times(timeline(np.ones((12, 4))).drop("optype"))
    with pytest.raises(TimelineError, match="no stage has 3 ranks"):
        step_times(timeline(np.ones((12, 2))))
    with pytest.raises(OnsetBacktestError, match="holds 10 steps"):
        backtest_straggler(timeline(np.ones((10, 4))))


@pytest.mark.traces
def test_the_recorded_straggler_is_found_within_ten_steps(traces):
    record = pl.read_parquet(traces / "stragglers" / "bytedance-trace_AR.parquet")
    times = step_times(record)
    assert detection_steps(times, straggler.forecast(times)) == {0: 2}
    report = backtest_straggler(record)
    horizon = horizon_name(report.calibration[0]["horizon_s"])
    model, z = (report.value(f"average_precision_{horizon}", who) for who in ("", "ewma_z_score"))
    assert model >= 1.5 * z
    assert {"rank", "step", "p_onset"} <= set(report.predictions.columns)
    others = report.predictions.filter(pl.col("rank") != 0)
    assert (others["p_onset"] < 0.05).all()


def test_areas_equal_the_library_s():
    rng = np.random.default_rng(1)
    came = rng.random(3000) < 0.05
    score = np.round(rng.normal(size=3000) + came, 1)  # with ties
    ranked = RankedRows(came, score)
    assert ranked.average_precision() == pytest.approx(average_precision_score(came, score))
    assert ranked.auc() == pytest.approx(roc_auc_score(came, score))


def test_alarms_stand_until_the_horizon_or_the_onset():
    at = np.arange(0.0, 600.0, 10.0)
    p = np.where((at >= 100) & (at < 400), 0.9, 0.0)[:, None]
    onset_s = np.array([150.0])
    came = ((onset_s - at[:, None] > 0) & (onset_s - at[:, None] <= 100))[:, :1]
    judged = Judged(
        (100.0,),
        np.zeros(60, int),
        at,
        came,
        np.ones((60, 1), bool),
        np.zeros(1, int),
        onset_s,
        {"": p, "never": p * 0},
    )
    n = count_alarms(judged, "", 0.5)
    # Raised at 100 (right, 50 s ahead), at 150, 250 and 350 (wrong).
    assert (n.raised, n.right, n.caught, n.leads_s.tolist()) == (4, 1, 1, [50.0])
    assert count_alarms(judged, "never", 0.5).raised == 0
    scores = {(s.metric, s.baseline): s.interval for s in event_scores(judged, draws=10)}
    assert scores["average_precision_100s_ratio", "never"].low is None  # one day is no block bootstrap
    assert scores["brier_skill_100s", "never"].value < 0


def faults(nodes=60, days=100, seed=2):
    """A fleet in which some nodes fault again soon after they return."""
    rng = np.random.default_rng(seed)
    rows = []
    for node in range(nodes):
        t = rng.exponential(60 if node % 4 else 15)
        while t < days:
            end = t + 0.5
            rows.append({"node_id": f"n{node}", "event_time": START + timedelta(days=t), "event_type": "fault_start",
                         "class": "GPU"})  # fmt: skip
            rows.append({"node_id": f"n{node}", "event_time": START + timedelta(days=end), "event_type": "fault_end",
                         "class": "GPU"})  # fmt: skip
            t = end + (rng.exponential(1.0) if rng.random() < 0.4 else rng.exponential(60 if node % 4 else 15))
    return pl.DataFrame(rows).with_columns(pl.col("event_time").dt.cast_time_unit("us"))


def test_faults_walk_forward_beside_their_baselines():
    record = faults()
    report = backtest_faults(record, nodes=80, refit_days=30)
    rows = report.predictions
    assert rows.columns == ["node", "ts", "horizon", "p_fault"]
    assert rows["node"].n_unique() == 80
    wide = rows.pivot(on="horizon", index=["node", "ts"], values="p_fault").drop_nulls()
    assert (wide["1h"] <= wide["1d"]).all()
    assert (wide["1d"] <= wide["7d"]).all()
    assert (rows["ts"] >= report.start).all()
    assert report.value("average_precision_1d") > report.value("average_precision_1d", "climatology")
    top = "top_5pct_share_of_faults_7d"
    assert 0 < report.value(top) <= report.value(top, "ceiling") <= 1
    paired = faults_of(record)
    assert faults_of(paired).equals(paired.sort("node", "start_time"))
    twice = pl.concat([record, record.sample(fraction=0.5, seed=1)])
    assert faults_of(twice).equals(paired), "a row that comes twice is one event"
    assert faults_of(pl.concat([paired, paired.head(40)])).equals(faults_of(paired))
    with pytest.raises(FaultBacktestError, match="--nodes 3: the record names"):
        backtest_faults(record, nodes=3)
    with pytest.raises(FaultBacktestError, match="event_type 'odd' is unknown; known: fault_start"):
        faults_of(record.with_columns(pl.lit("odd").alias("event_type")))


def levels(minutes=60, seed=0):
    """Two GPUs: one idles, one works in spells; irregular samples."""
    rng = np.random.default_rng(seed)
    frames = []
    for name, high in (("idle", 150.0), ("busy", 600.0)):
        t = np.cumsum(rng.choice([1.0, 2.0, 5.0], size=int(minutes * 60 / 2.6)))
        x = np.where((t // 90) % 2 == 1, high, 150.0) + rng.normal(0, 2, len(t))
        frames.append(
            pl.DataFrame(
                {"ts": [START + timedelta(seconds=s) for s in t], "node": "n", "gpu_uuid": name, "gpu_power_w": x}
            )
        )
    return pl.concat(frames)


def test_levels_go_by_time_and_know_nothing_later():
    samples = levels(minutes=30)
    cut = START + timedelta(minutes=15)
    whole, part = (level_rows(s, "gpu_power_w", (60.0,)) for s in (samples, samples.filter(pl.col("ts") < cut)))
    mine = whole.at_s < cut.timestamp()
    np.testing.assert_allclose(whole.matrix[mine], part.matrix, rtol=1e-6, atol=1e-6)
    later = np.flatnonzero(~np.isnan(whole.came[:, 0]))[::50]
    for row in later:
        same = whole.unit == whole.unit[row]
        nearest = np.abs(whole.at_s[same] - whole.at_s[row] - 60.0).argmin()
        assert whole.came[row, 0] == whole.last[same][nearest]
    of_nodes = level_rows(samples.drop("gpu_uuid").unique("ts"), "gpu_power_w", (60.0,))
    assert of_nodes.uuids == ["n"]
    with pytest.raises(LevelError, match="horizon 1 s is shorter than the 2 s between samples"):
        level_rows(samples, "gpu_power_w", (1.0, 60.0))
    with pytest.raises(LevelError, match="no quantity 'gpu_powr_w' in these samples; there are: gpu_power_w"):
        level_rows(samples, "gpu_powr_w", (60.0,))


def test_a_periodic_load_is_forecast_better_than_it_stands():
    report = backtest_level(levels(), "gpu_power_w", horizons_s=(60.0,))
    assert report.value("mae_60s_moving") < 0.6 * report.value("mae_60s_moving", "persistence")
    assert report.predictions.columns == [
        "ts", "cluster", "node", "gpu_uuid", "horizon_s", "point", "q10", "q50", "q90",
    ]  # fmt: skip
    assert (report.predictions["q10"] <= report.predictions["q90"]).all()


def test_of_many_gpus_at_work_a_few_are_named_and_the_rest_counted():
    one = levels(minutes=30)
    busy = one.filter(gpu_uuid="busy")
    samples = pl.concat([one, *(busy.with_columns(gpu_uuid=pl.lit(f"busy-{i}")) for i in range(6))])
    (note,) = (note for note in backtest_level(samples, "gpu_power_w", horizons_s=(60.0,)).notes if "at work" in note)
    assert note.startswith("7 of 8 GPUs are at work (busy, busy-0, busy-1, busy-2, busy-3 and 2 more): ")


@pytest.mark.traces
def test_the_recorded_busy_gpu_is_forecast_better_than_it_stands(traces):
    samples = pl.read_parquet(traces / "telemetry" / "amd-mi300x-2025.parquet")
    report = backtest_level(samples, "gpu_power_w", horizons_s=(60.0,))
    assert report.value("mae_60s_moving") < report.value("mae_60s_moving", "persistence")
    assert any("Too few GPU-days" in note for note in report.notes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["bottleneck"], "needs --class NAME, one of: shortage, straggler, thermal_throttle"),
        (["bottleneck", "--class", "memory"], "no class 'memory'; classes: shortage"),
        (["bottleneck", "--class", "shortage"], "needs --occupancy FILE"),
        (["bottleneck", "--class", "shortage", "--faults", "F"], "--faults does not go with backtest bottleneck"),
        (["bottleneck", "--class", "straggler", "--timeline", "F", "--horizons", "30"], "--horizons does not go with"),
        (["level", "--telemetry", "F"], "needs --quantity NAME"),
        (["level", "--telemetry", "F", "--quantity", "x", "--horizons", "60,30"], "give rising seconds"),
        (["level", "--telemetry", "F", "--quantity", "x", "--horizons", "nan"], "give rising seconds"),
        (["level", "--telemetry", "F", "--quantity", "x", "--horizons", "30,inf"], "give rising seconds"),
        (["level", "--telemetry", "F", "--quantity", "x", "--nodes", "3"], "--nodes does not go with backtest level"),
        (["faults", "--faults", "F", "--class", "shortage"], "--class does not go with backtest faults"),
        (["faults", "--jobs", "F"], "--jobs does not go with backtest faults: it goes with runtime"),
        (["runtime", "--jobs", "F", "--faults", "F"], "--faults does not go with backtest runtime: it reads --jobs"),
        (["runtime"], "backtest runtime needs --jobs FILE"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_named(tmp_path, options, words):
    file = tmp_path / "f.parquet"
    levels(minutes=1).write_parquet(file)
    said = CliRunner().invoke(
        cli, ["backtest", *(str(file) if o == "F" else o for o in options), "--out", str(tmp_path / "o")]
    )
    assert said.exit_code == 2
    assert words in " ".join(said.output.split()).replace("│ ", "")


def test_stragglers_are_read_from_a_timeline_or_from_telemetry(tmp_path):
    file = tmp_path / "f.parquet"
    levels(minutes=1).write_parquet(file)
    for files, words in (
        (["--telemetry"], "do not tell when a GPU is in straggler"),
        (["--telemetry", "--timeline"], "--telemetry does not go with backtest bottleneck --class straggler"),
        ([], "backtest bottleneck --class straggler needs --timeline FILE"),
    ):
        options = [part for name in files for part in (name, str(file))]
        said = CliRunner().invoke(
            cli, ["backtest", "bottleneck", "--class", "straggler", *options, "--out", str(tmp_path / "o")]
        )
        assert said.exit_code != 0
        assert words in " ".join(f"{said.output} {said.exception}".split()).replace("│ ", "")


def test_a_run_writes_three_files(tmp_path):
    ratios = np.ones((40, 4))
    ratios[20:, 3] = 1.5
    file = tmp_path / "steps.parquet"
    timeline(ratios, clock=False).write_parquet(file)
    said = CliRunner().invoke(
        cli, ["backtest", "bottleneck", "--timeline", str(file), "--class", "straggler", "--out", str(tmp_path / "o")]
    )
    assert said.exit_code == 0, said.output
    body = json.loads((tmp_path / "o" / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (body["subject"], body["file"]) == ("straggler", "steps.parquet")
    page = (tmp_path / "o" / "report.html").read_text()
    assert "EWMA z-score (ewma_z_score)" in page
    assert "http" not in page.split("<script")[0]
    assert pl.read_parquet(tmp_path / "o" / "predictions.parquet").height == 160
    assert finite({"a": [float("nan"), np.float64(1.0)]}) == {"a": [None, 1.0]}


def test_an_outcome_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    file, out = tmp_path / "steps.parquet", tmp_path / "o"
    timeline(np.ones((40, 4)), clock=False).write_parquet(file)

    def run(seed):
        run_event_backtest("bottleneck", {"timeline": file}, out, bottleneck_class="straggler", seed=seed)
        return {path.name: path.read_bytes() for path in out.iterdir()}

    before = run(1)
    write = Path.write_text

    def full(path, text, *args, **kwargs):
        if "html" in path.name:
            write(path, text[:100])
            raise OSError(28, "No space left on device")
        return write(path, text, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OutcomeError, match=r"cannot be written to .*: No space left on device"):
            run(2)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert run(2) != before


def test_naive_times_are_taken_as_utc(tmp_path):
    levels(minutes=1).with_columns(pl.col("ts").dt.replace_time_zone(None)).write_csv(tmp_path / "x.csv")
    assert read_record(tmp_path / "x.csv", "telemetry").schema["ts"] == pl.Datetime("us", "UTC")
    assert set(GPU_CLASSES) < set(CLASSES)


def test_odd_files_of_telemetry_are_named_or_read(tmp_path):
    samples = heating(hours=1)
    for changed, words in (
        (samples.drop("ts"), "lack ts; they have cluster"),
        (samples.drop("node"), "lack node; they have ts"),
        (samples.drop("gpu_uuid"), "lack gpu_uuid; they have ts"),
        (samples.with_columns(pl.col("ts").dt.epoch("s")), "ts is Int64; it must be times"),
        (samples.with_columns(pl.col("ts").dt.to_string()), "ts is String; it must be times"),
        (samples.with_columns(pl.col("ts").dt.date()), "ts is Date; it must be times"),
    ):
        changed.write_parquet(tmp_path / "odd.parquet")
        with pytest.raises((EventBacktestError, OnsetBacktestError), match=words):
            run_event_backtest(
                "bottleneck",
                {"telemetry": tmp_path / "odd.parquet"},
                tmp_path / "o",
                bottleneck_class="thermal_throttle",
            )
    odd = samples.with_columns(
        gpu_uuid=pl.col("gpu_uuid").str.slice(1).cast(pl.Int64), node=pl.lit(7), job_id=pl.lit(4711),
        gpu_temp_c=pl.lit(float("inf")),
    )  # fmt: skip
    odd.write_csv(tmp_path / "odd.csv")
    read = read_record(tmp_path / "odd.csv", "telemetry")
    assert (read["gpu_uuid"][0], read["node"][0], read["job_id"][0], read["gpu_temp_c"][0]) == ("0", "7", "4711", None)
    report = backtest_telemetry(
        pl.concat([read, read.with_columns(pl.col("ts") + timedelta(hours=2))]), "thermal_throttle"
    )
    assert set(report.predictions["node"]) == {"7"}


def test_values_of_another_kind_in_other_files_are_named(tmp_path):
    queue, steps, file = occupancy([1, 2], [3, 4]), timeline(np.ones((40, 4))), tmp_path / "odd.parquet"
    for changed, kind, options, words in (
        (queue.with_columns(ts=pl.lit("x")), "occupancy", {"bottleneck_class": "shortage"}, "ts is String"),
        (
            queue.with_columns(total_gpu_num=pl.lit("x")),
            "occupancy",
            {"bottleneck_class": "shortage"},
            "'total_gpu_num'",
        ),
        (steps.with_columns(rank=pl.lit("x")), "timeline", {"bottleneck_class": "straggler"}, "column 'rank'"),
        (faults().with_columns(event_time=pl.lit("x")), "faults", {}, "event_time is String"),
        (faults().with_columns(event_time=pl.lit(5)), "faults", {}, "event_time is Int"),
    ):
        changed.write_parquet(file)
        with pytest.raises(EventBacktestError, match=words):
            run_event_backtest("bottleneck" if options else "faults", {kind: file}, tmp_path / "o", **options)
    steps.with_columns(start_ts=pl.lit(float("nan"))).write_parquet(file)
    run_event_backtest("bottleneck", {"timeline": file}, tmp_path / "o", bottleneck_class="straggler")
    assert not list((tmp_path / "o").glob("*.part"))


def heating(hours=6, seed=1):
    """Eight GPUs that heat up to their limit now and then, over four minutes, and cool again."""
    rng = np.random.default_rng(seed)
    frames = []
    for gpu in range(8):
        t = np.arange(0, hours * 3600, 15.0) + rng.uniform(0, 2, int(hours * 240))
        margin = 20 + rng.normal(0, 0.4, len(t))
        for start in np.arange(rng.uniform(600, 3000), hours * 3600, 3000):
            into = (t - start) / 240
            margin = np.where((into >= 0) & (into < 1.3), 20 - 22 * np.minimum(into, 1), margin)
        frames.append(
            pl.DataFrame(
                {
                    "ts": [START + timedelta(seconds=s) for s in t], "cluster": "c", "node": f"n{gpu // 4}",
                    "gpu_uuid": f"g{gpu}", "gpu_temp_c": 90 - margin, "gpu_temp_margin_c": margin,
                    "is_thermal_slowdown": margin <= 0,
                }
            )
        )  # fmt: skip
    return pl.concat(frames)


def test_a_class_of_gpus_is_backtested_on_the_columns_there_are():
    samples = heating()
    report = backtest_telemetry(samples, "thermal_throttle")
    rows = report.predictions
    assert rows.columns == ["ts", "cluster", "node", "gpu_uuid", "horizon_s", "p_onset"]
    assert sorted(rows["horizon_s"].unique()) == [30.0, 60.0, 90.0, 120.0]
    assert report.onsets == 16
    assert report.train_end is not None
    assert report.start - report.train_end >= timedelta(seconds=120 + 600)
    assert report.value("average_precision_120s") > 0.8
    assert report.value("brier_skill_120s", "any") > 0
    point = next(row for row in report.operating if row["worth"] == 1 and row["forecaster"] == "")
    assert float(point["recall"]) > 0.8
    assert float(point["lead_s"]) >= 45
    with pytest.raises(OnsetBacktestError, match="do not tell when a GPU is in nvlink_saturation: ts, cluster, node"):
        backtest_telemetry(samples, "nvlink_saturation")
    with pytest.raises(OnsetBacktestError, match="told by --gpu-model alone"):
        backtest_telemetry(samples, "nvlink_saturation")
    with pytest.raises(OnsetBacktestError, match="no limits are known of the model 'H10'; known: A800, A100"):
        backtest_telemetry(samples, "nvlink_saturation", gpu_model="H10")
    with pytest.raises(OnsetBacktestError, match=r"docs/nowcast\.md$"):
        backtest_telemetry(samples, "nvlink_saturation", gpu_model="NVIDIA H100 80GB HBM3")
    quiet = samples.with_columns(gpu_temp_margin_c=pl.lit(20.0), is_thermal_slowdown=pl.lit(False))
    with pytest.raises(OnsetBacktestError, match="0 onsets of thermal_throttle to learn from and 0 to judge by"):
        backtest_telemetry(quiet, "thermal_throttle")
