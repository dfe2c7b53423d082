"""No forecast knows the future: scramble everything later than a moment, and each forecast made for it keeps its bits.

Scrambled are the ends, states and starts of whatever had not ended or started by then and jobs submitted later; in a
test of its own the outcome of the very job asked about, even one that started the moment it was submitted. Models are
fitted at that moment as well, and their files must not move a byte.
"""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory, JobTable
from features.job_outcomes import failure_matrix
from features.job_queue import wait_features
from features.job_survivors import survivors
from features.jobs import feature_matrix, job_features, microseconds
from models.backtest import backtest
from models.failure import FailureForecaster
from models.forest import ForestSize
from models.live import Champions, forecast_jobs
from models.registry import Registry
from models.remaining_task import RemainingTask
from models.runtime import RuntimeForecaster
from models.tasks import FailureTask, RuntimeTask, WaitTask
from models.training import as_of, train
from models.wait import WaitForecaster

SMALL = ForestSize(trees=12)
ROUNDS = 20
STATES = ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "RUNNING", "PENDING"]


def _simulated(jobs=2_500, seed=5):
    """A busy cluster of 24 nodes with odd microseconds, names, running and pending jobs at its end."""
    generator = np.random.default_rng(seed)
    start_of_all = datetime(2026, 1, 1, tzinfo=UTC)
    free_at = np.zeros(24)
    rows = []
    now = 0.0
    for number in range(jobs):
        now += generator.exponential(900) * (generator.random() > 0.3)  # three in ten come at the very same moment
        user = int(generator.integers(8))
        nodes = int(generator.choice([1, 2, 4, 8]))
        limit_s = int(generator.choice([3600, 14400, 43200]))
        run_s = min(limit_s, limit_s * generator.beta(1, 3) * (0.5 + user / 8))
        chosen = np.argsort(free_at)[:nodes]
        begin = max(now, float(free_at[chosen].max()))
        free_at[chosen] = begin + run_s
        rows.append({
            "cluster": "sim", "job_id": str(number), "user": f"u{user}", "queue": "gpu" if nodes > 2 else "small",
            "account": f"a{user % 3}", "array_job_id": str(number // 9) if user > 5 else None,
            "array_task": number % 9 if user > 5 else None, "gpu_type": "h100" if number % 4 else None,
            "name": f"run{user % 3}-{number}", "nodes": nodes, "cpus": nodes * 64, "gpus": nodes * 8,
            "time_limit_s": limit_s, "state": str(generator.choice(["COMPLETED", "FAILED"], p=[0.8, 0.2])),
            "submit_time": start_of_all + timedelta(seconds=now), "start_time": start_of_all + timedelta(seconds=begin),
            "end_time": start_of_all + timedelta(seconds=begin + run_s),
        })  # fmt: skip
    return pl.DataFrame(rows, infer_schema_length=None).cast(
        {name: pl.Datetime("us", "UTC") for name in ("submit_time", "start_time", "end_time")}
    )


def _recorded(traces, name):
    return pl.read_parquet(traces / "jobs" / f"{name}.parquet").sort("submit_time", "job_id")


@pytest.fixture(scope="module", params=["kth-sp2-1996", "llnl-atlas-2006", "simulated"])
def jobs(request, traces):
    return _simulated() if request.param == "simulated" else _recorded(traces, request.param)[4_000:7_000]


def _scramble(jobs, at, seed):
    """The same past, another future: nothing that had happened by `at` differs."""
    generator = np.random.default_rng(seed)
    at_us = int(pl.Series([at]).cast(pl.Datetime("us", "UTC")).to_physical()[0])
    submit, start, end = (
        jobs[name].to_physical().to_numpy().copy() for name in ("submit_time", "start_time", "end_time")
    )
    state = jobs["state"].to_numpy().copy()
    is_new = submit > at_us
    will_start, will_end = start > at_us, end > at_us
    will_end = will_end | will_start
    later = lambda n: at_us + 1 + generator.integers(0, 10**12, n)  # noqa: E731
    start[will_start] = later(will_start.sum())
    end[will_end] = np.maximum(later(will_end.sum()), start[will_end])
    state[will_end] = generator.choice(STATES, will_end.sum())
    fields = {name: jobs[name].to_numpy().copy() for name in ("user", "cpus", "time_limit_s", "name")}
    shuffled = generator.permutation(np.flatnonzero(is_new))
    for values in fields.values():
        values[np.flatnonzero(is_new)] = values[shuffled]
    times = {"start_time": start, "end_time": end}
    never = generator.random(len(jobs)) < 0.2
    out = jobs.with_columns(
        *(pl.Series(name, values, dtype=jobs.schema[name], strict=False) for name, values in fields.items()),
        *(
            pl.Series(name, values).cast(pl.Datetime("us", "UTC")).set(pl.Series(which & never), None)
            for (name, values), which in zip(times.items(), (will_start, will_end), strict=True)
        ),
        pl.Series("state", state),
    )
    out = out.with_columns(
        end_time=pl.when(pl.col("start_time").is_not_null() | ~pl.Series(will_start)).then("end_time")
    )
    keep = ~is_new | (generator.random(len(jobs)) < 0.7)
    return out.filter(pl.Series(keep))


def _moments(jobs, count=1, seed=9):
    """Moments at which something was just submitted, with outcomes on both sides."""
    rows = np.random.default_rng(seed).choice(np.arange(int(0.5 * jobs.height), int(0.9 * jobs.height)), count, False)
    return [jobs["submit_time"][int(row)] for row in rows]


def _bytes(frame):
    return {name: frame[name].to_numpy().tobytes() for name in frame.columns}


def _same(left, right):
    assert left.columns == right.columns
    a, b = _bytes(left), _bytes(right)
    assert [name for name in left.columns if a[name] != b[name]] == []


@pytest.mark.traces
def test_every_forecast_stays_identical_when_the_future_is_scrambled(jobs):
    for number, at in enumerate(_moments(jobs)):
        other = _scramble(jobs, at, seed=number)
        assert not jobs.filter(pl.col("end_time") > at).equals(other.filter(pl.col("end_time") > at))
        known = jobs.filter(pl.col("submit_time") <= at)
        asked = known.filter(pl.col("end_time") > at)
        asked_other = other.filter(pl.col("submit_time") <= at).filter(known["end_time"] > at)
        assert asked.height > 3
        assert asked["job_id"].to_list() == asked_other["job_id"].to_list()
        true, scrambled = JobHistory(jobs), JobHistory(other)

        # Features of everything submitted so far, at its own submit and at the moment.
        past = known.filter(pl.col("submit_time") >= at - timedelta(days=20))
        past_other = other.filter(pl.col("job_id").is_in(past["job_id"].to_list()))
        _same(job_features(past, true), job_features(past_other, scrambled))
        _same(wait_features(past, true), wait_features(past_other, scrambled))
        _same(job_features(asked, true, at), job_features(asked_other, scrambled, at))
        _same(wait_features(asked, true, at), wait_features(asked_other, scrambled, at))

        # Models fitted at the moment, and what they say.
        for one, two in (
            [RuntimeForecaster.fit(h, at, size=SMALL) for h in (true, scrambled)],
            [WaitForecaster.fit(h, at, size=SMALL) for h in (true, scrambled)],
            [FailureForecaster.fit(h, at, rounds=ROUNDS) for h in (true, scrambled)],
        ):
            assert one.to_files() == two.to_files()
            _same(one.forecast(asked, true, at), two.forecast(asked_other, scrambled, at))
            if isinstance(one, RuntimeForecaster):
                running = asked["start_time"] <= at
                left = one.remaining(asked.filter(running), true, at)
                _same(left, two.remaining(asked_other.filter(running), scrambled, at))


@pytest.mark.traces
def test_a_jobs_own_outcome_never_reaches_its_own_features(jobs):
    """Not even when it started, or started and ended, the moment it was submitted."""
    whole = job_features(jobs, jobs), wait_features(jobs, jobs)
    at_once = np.flatnonzero((jobs["start_time"] == jobs["submit_time"]).to_numpy())
    generator = np.random.default_rng(4)
    rows = [*generator.choice(at_once, 6, replace=False), *generator.choice(jobs.height, 4, replace=False)]
    for row in map(int, rows):
        is_own = pl.int_range(pl.len()) == row
        submit = pl.col("submit_time")
        other = jobs.with_columns(
            start_time=pl.when(is_own).then(submit + timedelta(days=400)).otherwise("start_time"),
            end_time=pl.when(is_own).then(submit + timedelta(days=500)).otherwise("end_time"),
            state=pl.when(is_own).then(pl.lit("NODE_FAIL")).otherwise("state"),
        )
        _same(job_features(other[row], other), whole[0][row])
        _same(wait_features(other[row], other), whole[1][row])


@pytest.mark.traces
@pytest.mark.parametrize("name", ["kth-sp2-1996", "llnl-atlas-2006", "cedar-2021", "microsoft-itp-2021"])
def test_200_jobs_are_seen_alike_whatever_comes_after_their_submit(name, traces):
    """All that a forecaster is shown of a job at its submit and at moments of its run: features, bit for bit."""
    jobs = _recorded(traces, name)
    if name == "microsoft-itp-2021":
        jobs = jobs.filter(pl.col("cluster") == "itp-04")
    jobs = jobs[4_000:5_000]
    assert jobs.height > 500
    history = JobHistory(jobs)
    generator = np.random.default_rng(3)
    moved = 0
    for row in generator.choice(np.arange(jobs.height // 4, jobs.height), 200, replace=False):
        submit, start = jobs["submit_time"][int(row)], jobs["start_time"][int(row)]
        moments = [submit]
        if start is not None and row % 4 == 0:
            moments.append(start + timedelta(seconds=600))
        for at in moments:
            if at > submit and not (jobs["end_time"][int(row)] or at) > at:
                continue
            other = _scramble(jobs, at, seed=int(row))
            moved += other.height != jobs.height or not other["end_time"].equals(jobs["end_time"])
            scrambled, own = JobHistory(other), jobs[int(row)]
            own_other = other.filter(pl.col("job_id") == own["job_id"][0])
            _same(job_features(own, history, at), job_features(own_other, scrambled, at))
            _same(wait_features(own, history, at), wait_features(own_other, scrambled, at))
            table, moment = JobTable(own), microseconds(at)
            X = feature_matrix(table, history, np.array([moment]))
            for matrix, of in ((failure_matrix, X), (survivors, None)):
                told = []
                for frame, past in ((own, history), (own_other, scrambled)):
                    asked = JobTable(frame)
                    if of is None:
                        told.append(matrix(asked, past, np.array([moment]), np.array([600.0]), X).tobytes())
                    else:
                        told.append(matrix(asked, past, np.array([moment]), of).tobytes())
                assert told[0] == told[1]
    assert moved > 150


@pytest.mark.traces
@pytest.mark.parametrize("name", ["kth-sp2-1996", "llnl-atlas-2006", "cedar-2021"])
def test_a_backtest_says_the_same_of_what_came_before_a_moment_whatever_came_after(name, traces):
    """Whole backtests: fits, released labels, choices, and who is in the history at all."""
    jobs = _recorded(traces, name).filter(pl.col("end_time").is_not_null())
    jobs = jobs[::20] if name == "cedar-2021" else jobs[4_000:5_600]  # cedar's newest thousand are of some hours
    at = jobs["submit_time"][int(0.9 * jobs.height)]
    generator = np.random.default_rng(1)
    later = (pl.col("end_time") > at) & (pl.col("end_time") > pl.col("start_time"))
    # Every job keeps an outcome of some kind, so that the same jobs are judged.
    factor = pl.Series(generator.uniform(1.1, 3.0, jobs.height))
    seconds = (pl.col("end_time") - pl.max_horizontal("start_time", pl.lit(at))).dt.total_microseconds() * factor
    end = pl.max_horizontal("start_time", pl.lit(at)) + pl.duration(microseconds=seconds.cast(pl.Int64) + 1)
    ended = ["COMPLETED", "FAILED"]
    drawn = pl.Series(generator.choice(ended, jobs.height))
    other = jobs.with_columns(
        end_time=pl.when(later).then(end).otherwise("end_time"),
        state=pl.when(later & pl.col("state").is_in(ended)).then(drawn).otherwise("state"),
    )  # fmt: skip
    # And jobs that wait at the moment: here they run some day, there they are cancelled before they ever do.
    waiting = jobs.filter(pl.col("submit_time") < at).tail(150).with_columns(
        job_id=pl.format("w{}", "job_id"), start_time=pl.lit(None, jobs.schema["start_time"]), state=pl.lit("PENDING"),
        end_time=pl.lit(None, jobs.schema["end_time"]),
    )  # fmt: skip
    gone = pl.lit(jobs["end_time"].max() + timedelta(days=9))
    cancelled = waiting.with_columns(end_time=gone, state=pl.lit("CANCELLED"))
    assert (jobs["end_time"] != other["end_time"]).sum() > 20
    for task in (RuntimeTask(SMALL), RemainingTask(SMALL), FailureTask(ROUNDS)):
        said = [
            backtest(task, pl.concat([frame, more]), refit_days=30, draws=1).predictions
            for frame, more in ((jobs, waiting), (other, cancelled))
        ]
        starts = jobs.select("job_id", "submit_time", "start_time")
        said = [frame.join(starts, on=["job_id", "submit_time"], how="left") for frame in said]
        moment = pl.col("submit_time")  # of what is said: some is said of running jobs
        if "elapsed_s" in said[0].columns:
            moment = pl.col("start_time") + pl.duration(seconds=pl.col("elapsed_s"))
        elif task.name == "job_failure":
            moment = pl.col("start_time") + pl.duration(seconds=3600)
        both = _both([frame.filter(moment < at) for frame in said])
        assert both[0].height > 100
        _same(*both)


def _both(frames):
    """What both say of the jobs that both judge, in one order."""
    keys = ["job_id", "submit_time", *(name for name in ("elapsed_s",) if name in frames[0].columns)]
    one, two = (frame.sort(keys) for frame in frames)
    return tuple(
        mine.join(theirs.select(keys), on=keys, how="semi", maintain_order="left").drop(keys)
        for mine, theirs in ((one, two), (two, one))
    )


@pytest.mark.traces
def test_training_and_live_rows_stay_identical_when_the_future_is_scrambled(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr("models.registry.code_revision", lambda: None)  # a commit meanwhile is no leak
    at = _moments(jobs, seed=11)[0] + timedelta(microseconds=1)
    other = _scramble(jobs, at, seed=3)
    rows, files = [], []
    for name, frame in (("true", jobs), ("scrambled", other)):
        registry = Registry(tmp_path / name)
        for task in (RuntimeTask(SMALL), WaitTask(SMALL), FailureTask(ROUNDS)):
            report = train(task, frame, registry, at, cluster="c")
            registry.promote(task.name, report.version, "for the test")
            files.append((report.version, report.reason, dict(registry.load(task.name, with_tables=True).files)))
        known = as_of(frame, at)
        rows.append(forecast_jobs(Champions(registry), known, known, at))
        rows.append(forecast_jobs(None, known, known, at))
    assert files[:3] == files[3:]
    assert rows[0].height > 3
    assert rows[0].equals(rows[2])
    assert rows[1].equals(rows[3])


def test_the_scrambler_does_scramble_and_leaves_the_past():
    jobs = _simulated(400)
    at = jobs["submit_time"][200]
    other = _scramble(jobs, at, 0)
    assert as_of(jobs, at - timedelta(microseconds=1)).equals(as_of(other, at - timedelta(microseconds=1)))
    joined = jobs.join(other, on="job_id", suffix="_other").filter(pl.col("end_time") > at)
    assert (joined["end_time"] == joined["end_time_other"]).mean() < 0.01
    assert joined["end_time_other"].null_count() > 0


def test_a_leak_would_be_seen():
    """Features of an end that had not happened differ between the two futures: the comparison can fail."""
    jobs = _simulated(400)
    at = jobs["submit_time"][200]
    later = at + timedelta(days=2)
    known = jobs.filter(pl.col("submit_time") <= at)
    one, two = (job_features(known[-1:], frame, later) for frame in (jobs, _scramble(jobs, at, 0)))
    assert _bytes(one) != _bytes(two)
