"""Published forecasts beside what came: the join by hand, figures, drift, verdicts, and the night on a real store."""

import random
from datetime import UTC, datetime, timedelta
from statistics import NormalDist

import dagster as dg
import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory
from features.jobs import microseconds
from features.vocabulary import DEMAND_QUANTILE_COLUMNS, QUANTILE_COLUMNS, QUANTILES, conform
from models.demand_outcomes import judge_demand
from models.drift import Shift, input_shifts, psi
from models.outcome_scores import KindOutcome, judge_outcomes
from models.outcome_verdicts import VERDICTS, beats_baseline, stable, verdicts
from models.outcomes import join_outcomes
from models.start_plans import PLAN, plans_at
from pipelines.assets.outcome import judged
from pipelines.definitions import build_definitions
from pipelines.job_history import ingest_jobs
from pipelines.outcome_report import print_outcomes
from pipelines.outcomes import score_outcomes, verdict_of
from pipelines.publish import publish_jobs
from pipelines.settings import parse_settings
from pipelines.steps import score_outcomes_of
from pipelines.store import Store
from scheduler_hints.metrics import Metrics
from scheduler_hints.outcome_gauges import OutcomesWord, outcomes_path, write_word
from scheduler_hints.reloader import ShardStore
from tests.pipelines_world import START, Queue, job, jobs_frame, seconds
from tests.store_child import open_store

DAY_S = 86_400
UNTIL = datetime(2026, 5, 4, tzinfo=UTC)
BEGIN = UNTIL - timedelta(days=7)
SPAN = (microseconds(BEGIN), microseconds(UNTIL))
_Z = [NormalDist().inv_cdf(level) for level in QUANTILES]


def published(job_id, submit_s, kind, made_s, middle_s, spread=0.5, p_fail=None, p_start=None):
    """One row of `out_job_forecasts`; times in seconds after START."""
    quantiles = {name: middle_s * float(np.exp(spread * z)) for name, z in zip(QUANTILE_COLUMNS, _Z, strict=True)}
    return {
        "cluster": "alpha", "job_id": str(job_id), "submit_time": START + seconds(submit_s), "forecast": kind,
        "generated_at": START + seconds(made_s), "valid_until": START + seconds(made_s + 600), "data_age_s": 1.0,
        "model_version": "v7", "state": "RUNNING" if kind == "remaining" else "PENDING", "p_fail": p_fail,
        **dict.fromkeys(("p_start_60s", "p_start_600s", "p_start_3600s"), p_start), **quantiles,
    }  # fmt: skip


def forecasts_frame(rows):
    return conform(pl.DataFrame(rows, infer_schema_length=None), "out_job_forecasts")


def history(weeks=7, *, run_scale=1.0, limit_scale=1, said_scale=1.0, wait_scale=1.0, seed=5):
    """Jobs of ten users every twenty minutes, and what was published of those of the last eight days.

    The last week's runtimes are `run_scale` times as long, its limits `limit_scale` and its waits `wait_scale` times;
    forecasts know none of it.
    """
    chance = random.Random(seed)
    newest_s = (BEGIN - START).total_seconds()
    jobs, said = [], []
    for i in range(weeks * 7 * 72):
        submit = round((UNTIL - START).total_seconds()) - (weeks * 7 * 72 - i) * 1200
        user = chance.randrange(10)
        is_new = submit >= newest_s
        middle = 300.0 * (1 + user % 5)
        run = max(1, round(middle * chance.lognormvariate(0, 0.5) * (run_scale if is_new else 1.0)))
        wait = round(chance.lognormvariate(5.5, 0.5) * (wait_scale if is_new else 1.0))
        state = "FAILED" if chance.random() < 0.05 + 0.05 * (user % 5) else "COMPLETED"
        start, end = submit + wait, submit + wait + run
        row = job(i, submit, start, end, state, user=f"u{user}", gpus=1 + user % 2, seen_s=end)
        limit = 1800 * (1 + user % 5) * (limit_scale if is_new else 1)
        jobs.append(row | {"time_limit_s": limit, "queue": f"q{user % 3}"})
        if submit < newest_s - DAY_S:
            continue
        first = submit + 10
        said.append(published(i, submit, "runtime", first, middle * said_scale, p_fail=0.05 + 0.05 * (user % 5)))
        said += [
            published(i, submit, "wait", at, max(1.0, 245.0 - (at - submit)), p_start=0.2)
            for at in range(first, start, 100)
        ]
        said += [
            published(i, submit, "remaining", at, max(1.0, middle - (at - start)), p_fail=0.1)
            for at in range(start + 90, end, 300)
        ]
    return jobs_frame(jobs), forecasts_frame(said)


@pytest.fixture(scope="module")
def steady():
    return history()


# --- the join ---------------------------------------------------------------------------------------------


def joined_of(jobs, said, begin=None, until=None):
    begin, until = begin or START - seconds(DAY_S), until or START + seconds(DAY_S)
    return join_outcomes(forecasts_frame(said), jobs_frame(jobs), microseconds(begin), microseconds(until))


def test_the_first_publication_counts_and_those_at_landmarks_as_they_were_published():
    said = [
        published(1, 0, "runtime", 30, 500.0, p_fail=0.2),
        published(1, 0, "runtime", 330, 9000.0, p_fail=0.9),
        *(published(1, 0, "wait", at, 100.0 + at) for at in (30, 330, 630, 930)),
        *(published(1, 0, "remaining", at, 50.0) for at in (1010, 1110, 1310, 1710)),
    ]
    found = joined_of([job(1, 0, 1000, 2000)], said).sort("forecast", "landmark_s")
    shown = found.with_columns(((pl.col("generated_at") - START).dt.total_seconds()).alias("made_s"))
    assert shown.select("forecast", "landmark_s", "made_s", "actual_s").rows() == [
        ("failure", 0, 30, None),
        ("remaining", 0, 1010, 990.0),
        ("remaining", 60, 1110, 890.0),
        ("remaining", 600, 1710, 290.0),
        ("runtime", 0, 30, 1000.0),
        ("wait", 0, 30, 970.0),
        ("wait", 60, 330, 670.0),
        ("wait", 600, 630, 370.0),
    ]
    assert found.filter(forecast="runtime")["q50_s"].item() == pytest.approx(500.0)
    assert found.filter(forecast="failure")["p_fail"].item() == 0.2
    assert set(found["state"]) == {"COMPLETED"}
    assert found.filter(forecast="wait")["released_at"].unique().item() == START + seconds(1000)


@pytest.mark.parametrize(
    "row, kinds",
    [
        (job(1, 0, 100, 400, "CANCELLED"), ["failure", "runtime", "wait"]),  # it ran: the protocol judges it
        (job(1, 0, None, 400, "CANCELLED", nodes=()), []),  # it never started
        (job(1, 0, 100, 100, "FAILED"), ["failure", "wait"]),  # ran for no time
        (job(1, 0, 100, None, "RUNNING"), ["wait"]),
        (job(1, 0, None, None, "PENDING", nodes=()), []),
        (job(1, 0, 100, 400, "UNKNOWN"), ["runtime", "wait"]),
        (job(1, 0, 20, 400), ["failure", "runtime"]),  # it had started when its wait was published
        (job(1, 0, 10, 25), []),  # it was over when anything was
        (job(1, 0, 100, DAY_S + 5), ["wait"]),  # its end is released after the span
        (job(1, 77, 100, 400), []),  # the next attempt: another submission, of which nothing was published
    ],
)
def test_only_released_labels_of_the_protocol_count(row, kinds):
    said = [published(1, 0, "runtime", 30, 500.0, p_fail=0.2), published(1, 0, "wait", 30, 60.0)]
    assert sorted(joined_of([row], said)["forecast"]) == kinds


def test_no_publications_and_no_jobs_join_to_nothing():
    assert joined_of([job(1, 0, 10, 20)], [published(2, 0, "wait", 5, 1.0)]).is_empty()
    assert joined_of([], [published(2, 0, "wait", 5, 1.0)]).is_empty()
    none = forecasts_frame([published(2, 0, "wait", 5, 1.0)]).clear()
    assert join_outcomes(none, jobs_frame([job(1, 0, 10, 20)]), *SPAN).is_empty()


# --- figures ----------------------------------------------------------------------------------------------


def test_figures_of_a_steady_cluster(steady):
    jobs, said = steady
    joined = join_outcomes(said, jobs, *SPAN)
    found, rows = judge_outcomes(joined, JobHistory(jobs), draws=300)
    runtime = found["runtime"]
    assert 490 < runtime.rows <= 504
    assert runtime.versions == {"v7": runtime.rows}
    coverage, ratio = runtime.find("coverage_80"), runtime.find("male_ratio", runtime.best_baseline)
    assert coverage.value == pytest.approx(0.80, abs=0.05)
    assert coverage.low < 0.80 < coverage.high
    assert ratio.value < 1.0  # the true medians are better than medians of twenty, and clearly than means of two
    assert runtime.find("male_ratio", "last2_key").high < 1.0
    assert runtime.find("below_q90").value == pytest.approx(0.9, abs=0.04)
    by_hand = joined.filter(forecast="runtime").select((pl.col("q50_s") / pl.col("actual_s")).log().abs().mean()).item()
    assert runtime.find("male").value == pytest.approx(by_hand)
    assert found["remaining"].find("remaining_male_60s").value > 0
    assert found["remaining"].find("remaining_male_60s", "median_key").value > 0
    assert found["wait"].find("below_q95").value == pytest.approx(0.95, abs=0.04)
    assert found["wait"].find("wait_male_60s", "recent_waits").value > 0
    assert 0 < found["wait"].find("wait_brier_600s_60s").value < 1  # odds said after a minute of waiting
    assert found["wait"].find("wait_brier_600s_60s", "recent_waits").value > 0
    assert found["failure"].find("ece").value < 0.1
    assert found["failure"].find("brier", "rolling_rate").value > 0
    assert rows.height == joined.height
    assert rows.filter(pl.col("baseline").is_null()).is_empty()
    assert rows.filter(forecast="runtime")["baseline_s"].null_count() == 0


def test_baselines_know_nothing_that_came_after_the_publication(steady):
    """Of a publication at a moment, every job that ended later may have gone otherwise."""
    jobs, said = steady
    moment = BEGIN + timedelta(days=3)
    joined = join_outcomes(said, jobs, *SPAN)
    later = pl.col("end_time") >= moment
    moved = jobs.with_columns(
        pl.when(later).then(pl.col("end_time") + timedelta(hours=9)).otherwise("end_time").alias("end_time"),
        pl.when(later).then(pl.lit("FAILED")).otherwise("state").alias("state"),
    )
    early = pl.col("generated_at") < moment
    _, one = judge_outcomes(joined.filter(early), JobHistory(jobs), draws=20)
    _, two = judge_outcomes(joined.filter(early), JobHistory(moved), draws=20)
    columns = ["job_id", "forecast", "landmark_s", "baseline_s", "baseline_p_fail"]
    assert one.height > 500
    assert one.select(columns).equals(two.select(columns))


def test_demand_by_hand():
    jobs = jobs_frame([job(n, -3600 * n + 60, -3600 * n + 120, -3600 * n + 600) for n in range(1, 200)])
    until = START
    rows = pl.DataFrame(
        [
            {
                "generated_at": until - timedelta(hours=h + 1), "cluster": "alpha", "queue": None,
                "quantity": "arrivals", "unit": "jobs", "horizon_h": 1, "target_time": until - timedelta(hours=h),
                **{name: 1.0 + 0.5 * z for name, z in zip(DEMAND_QUANTILE_COLUMNS, _Z, strict=True)},
                "last_value": 3.0, "last_week_value": 2.0, "model_version": "demand",
            }
            for h in range(60)
        ],
        infer_schema_length=None,
    )  # fmt: skip
    found = judge_demand(conform(rows, "out_demand"), jobs, until - timedelta(days=3), until)
    assert found.rows == 60
    assert found.best_baseline == "same_hour_last_week"
    assert found.find("arrivals_mae_1h").value == pytest.approx(0.0)  # one job came each hour
    assert found.find("arrivals_mae_1h", "last_value").value == pytest.approx(2.0)
    assert found.find("arrivals_coverage_80_1h").value == 1.0
    few = judge_demand(conform(rows.head(20), "out_demand"), jobs, until - timedelta(days=3), until)
    assert not few.is_judged


# --- drift and verdicts -----------------------------------------------------------------------------------


def test_stability_index_by_hand():
    assert psi(np.array([50, 50]), np.array([500, 500])) == pytest.approx(0.0, abs=1e-12)
    p, q = np.array([89.5, 10.5]) / 100, np.array([50.5, 49.5]) / 100
    expected = float(np.sum((p - q) * np.log(p / q)))
    assert psi(np.array([89, 10]), np.array([50, 49])) == pytest.approx(expected)
    assert np.isfinite(psi(np.array([10, 0]), np.array([0, 10])))
    with pytest.raises(ValueError, match="must be the same"):
        psi(np.array([1]), np.array([1, 2]))


def test_inputs_of_a_steady_cluster_are_stable_and_new_limits_are_seen(steady):
    quiet = {shift.name: shift for shift in input_shifts(JobHistory(steady[0]), *SPAN)}
    assert set(quiet) == {"limit", "size", "queue", "key_seen"}
    assert all(shift.value < 0.25 for shift in quiet.values())
    assert all(shift.usual is not None for shift in quiet.values())
    moved = {shift.name: shift for shift in input_shifts(JobHistory(history(limit_scale=7)[0]), *SPAN)}
    assert moved["limit"].value > 1.0
    assert moved["queue"].value < 0.25
    verdict = stable(list(moved.values()))
    assert not verdict.passed
    assert "time limits" in verdict.words
    assert "queues" not in verdict.words
    assert input_shifts(JobHistory(steady[0].head(100)), *SPAN) == []


def test_a_week_that_differs_no_more_than_weeks_do_is_no_shift():
    assert stable([Shift("size", 0.6, 0.9, 500, 5000)]).passed
    assert stable([Shift("size", 0.6, 0.5, 500, 5000)]).passed
    assert not stable([Shift("size", 0.6, 0.4, 500, 5000)]).passed
    young = stable([Shift("size", 0.6, None, 500, 5000)])
    assert young.passed
    assert not young.is_judged
    assert "too few weeks" in young.words
    assert stable([Shift("size", 0.2, 0.1, 500, 5000)]).passed


@pytest.mark.parametrize(
    "changes, failing, words",
    [
        ({}, [], ""),
        ({"run_scale": 5.0}, ["runtime_calibrated", "runtime_beats_baseline"], "intervals are too narrow"),
        ({"said_scale": 8.0}, ["runtime_calibrated", "runtime_beats_baseline"], "worse"),
        ({"wait_scale": 6.0}, ["wait_calibrated"], "Starts that users are told are off; retrain"),
    ],
)
def test_verdicts(changes, failing, words):
    jobs, said = history(**changes)
    prepared = JobHistory(jobs)
    found, _ = judge_outcomes(join_outcomes(said, jobs, *SPAN), prepared, draws=300)
    told = verdicts(found, input_shifts(prepared, *SPAN))
    assert [verdict.name for verdict in told] == list(VERDICTS)
    assert [verdict.name for verdict in told if not verdict.passed] == failing
    assert words in " ".join(verdict.words for verdict in told if not verdict.passed)
    assert all(verdict.is_judged for verdict in told)


def test_too_few_outcomes_say_so_and_raise_no_alert():
    for verdict in verdicts({kind: KindOutcome(kind, 7) for kind in ("runtime", "wait")}, []):
        assert verdict.passed
        assert not verdict.is_judged
        assert "too few" in verdict.words
    assert "runtimes 7 have come to an end, 50 needed" in beats_baseline(KindOutcome("runtime", 7)).words


# --- the scheduler's own plans ------------------------------------------------------------------------------


def state(job_id, seen_s, planned_s=None, name="PENDING"):
    """One row of `core_job_states`; times in seconds after START."""
    return {
        "observed_at": START + seconds(seen_s), "cluster": "alpha", "job_id": str(job_id), "state": name,
        "planned_start_time": None if planned_s is None else START + seconds(planned_s),
    }  # fmt: skip


def test_the_plan_at_a_moment_is_the_newest_word_of_that_submission():
    states = conform(
        pl.DataFrame([
            state(1, 20), state(1, 80, 500), state(1, 200, 260), state(1, 300, name="RUNNING"),
            state(2, 30, 100), state(2, 60),  # the plan was taken back
            state(3, 10, 90),  # of an attempt before
        ], infer_schema_length=None),
        "core_job_states",
    )  # fmt: skip
    asked = [
        (1, 0, 10),
        (1, 0, 20),
        (1, 0, 199),
        (1, 0, 280),
        (2, 0, 59),
        (2, 0, 60),
        (3, 50, 70),
        (4, 0, 70),
        (1, 0, 80),
    ]
    frame = pl.DataFrame(
        [(str(i), START + seconds(submit), START + seconds(at)) for i, submit, at in asked],
        schema=["job_id", "submit_time", "at"], orient="row",
    )  # fmt: skip
    nan = float("nan")
    np.testing.assert_array_equal(plans_at(states, frame), [nan, nan, 301.0, 0.0, 41.0, nan, nan, nan, 420.0])
    assert plans_at(states, frame.clear()).shape == (0,)


def with_plans(jobs, said, late_s=1800):
    """Every second job had a start planned that was half an hour late."""
    starts = jobs.select("job_id", "submit_time", planned=pl.col("start_time") + timedelta(seconds=late_s))
    is_planned = (pl.col("forecast") == "wait") & (pl.col("job_id").cast(pl.Int64) % 2 == 0)
    told = said.join(starts, on=["job_id", "submit_time"], how="left", maintain_order="left")
    return told.with_columns(planned_start_time=pl.when(is_planned).then("planned")).drop("planned")


def test_planned_starts_are_judged_on_the_jobs_that_have_one(steady):
    jobs, said = steady
    joined = join_outcomes(with_plans(jobs, said), jobs, *SPAN)
    found, rows = judge_outcomes(joined, JobHistory(jobs), draws=200)
    wait = found["wait"]
    assert wait.find("planned_share", PLAN).value == pytest.approx(0.5, abs=0.01)
    assert wait.find("planned_mae_s", PLAN).value == pytest.approx(1800.0)
    assert wait.find("planned_late", PLAN).value == 1.0
    assert wait.find("planned_within_60s", PLAN).value == 0.0
    mine = rows.filter(pl.col("planned_s").is_not_null() & (pl.col("landmark_s") == 0))
    own = mine.select((pl.col("q50_s") / pl.col("actual_s")).log().abs().mean()).item()
    plan = mine.select((pl.col("planned_s") / pl.col("actual_s")).log().abs().mean()).item()
    assert wait.find("planned_male").value == pytest.approx(own)
    assert wait.find("planned_male", PLAN).value == pytest.approx(plan)
    assert wait.find("planned_male_ratio", PLAN).value == pytest.approx(own / plan)
    assert wait.find("planned_male_ratio", PLAN).high < 1.0
    assert wait.find("planned_male", "recent_waits").value > 0
    assert wait.find("planned_share_60s", PLAN).value == pytest.approx(0.5, abs=0.02)
    assert wait.find("planned_male_60s", PLAN).value > wait.find("planned_male_60s").value
    bare, _ = judge_outcomes(join_outcomes(said, jobs, *SPAN), JobHistory(jobs), draws=50)
    assert bare["wait"].find("planned_share", PLAN).value == 0.0
    assert bare["wait"].find("planned_male", PLAN) is None
    assert bare["wait"].find("male").value == wait.find("male").value


# --- the night --------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "state" / "store") as opened:
        yield opened


def fill(store, jobs, said):
    store.transact(lambda w: w.append("core_jobs", jobs))
    store.transact(lambda w: w.append("out_job_forecasts", said))


def test_a_night_joins_scores_and_keeps_the_same_at_every_run(store):
    jobs, said = history(run_scale=5.0, limit_scale=7, wait_scale=6.0)
    fill(store, jobs, with_plans(jobs, said))
    report = score_outcomes(store, "alpha", UNTIL + timedelta(hours=2), draws=200)
    assert report.error is None
    assert report.rows == store.query("SELECT count(*) AS n FROM out_outcomes")["n"][0] > 1500
    assert [verdict.name for verdict in report.verdicts if not verdict.passed] == list(VERDICTS)
    tasks = set(store.query("SELECT task FROM out_scores")["task"])
    assert tasks == {"published_runtime", "published_remaining", "published_wait", "published_job_failure", "inputs"}
    churn = store.query("SELECT baseline, metric, value FROM out_scores WHERE metric LIKE '%churn_move_s' ORDER BY ALL")
    moves = {(baseline, metric): value for baseline, metric, value in churn.iter_rows()}
    assert moves.keys() == {("", "churn_move_s"), ("", "planned_churn_move_s"), (PLAN, "planned_churn_move_s")}
    assert moves[PLAN, "planned_churn_move_s"] == 0.0  # the plans stood still
    steady_words, plan_words = report.starts
    assert f"moves by {moves['', 'churn_move_s']:.0f} s" in steady_words
    assert f"planned a start for 50% of {report.judged['wait']} jobs" in plan_words
    span = store.query("SELECT min(released_at) AS low, max(released_at) AS high FROM out_outcomes").row(0)
    assert BEGIN <= span[0] < span[1] < UNTIL
    hashes = [store.table_hash(table) for table in ("out_outcomes", "out_scores")]
    again = score_outcomes(store, "alpha", UNTIL + timedelta(hours=20), draws=200)
    assert [store.table_hash(table) for table in ("out_outcomes", "out_scores")] == hashes
    assert again.verdicts == report.verdicts
    so_far = score_outcomes(store, "alpha", UNTIL, draws=50, is_so_far=True)
    assert (so_far.rows, so_far.figures["runtime_male"]) == (report.rows, report.figures["runtime_male"])
    assert score_outcomes(store, "alpha", UNTIL - timedelta(hours=9), draws=50, is_so_far=True).rows < report.rows
    assert [store.table_hash(table) for table in ("out_outcomes", "out_scores")] == hashes  # nothing was kept
    score_outcomes(store, "alpha", UNTIL + timedelta(days=1, hours=2), draws=50)  # the next night has scores of its own
    assert store.query("SELECT count(DISTINCT ts) AS n FROM out_scores")["n"][0] == 2


def test_an_empty_and_a_tiny_cluster_say_too_few(store, tmp_path):
    settings = parse_settings({"state_dir": str(tmp_path / "state"), "clusters": {"alpha": {}}}, {})
    empty = score_outcomes_of(store, settings, "alpha", UNTIL + timedelta(hours=2))
    assert (empty.error, empty.rows, empty.scores) == (None, 0, 0)
    assert all("too few" in verdict.words and verdict.passed for verdict in empty.verdicts)
    jobs, said = history()
    few = jobs.tail(20)
    fill(store, few, said.join(few.select("job_id"), on="job_id", how="semi"))
    tiny = score_outcomes_of(store, settings, "alpha", UNTIL + timedelta(hours=2))
    assert (tiny.error, tiny.scores) == (None, 0)
    assert tiny.rows > 20
    assert "too few" in verdict_of(tiny, "runtime_calibrated").words
    with pytest.raises(KeyError, match="runtime_beats_baseline"):
        verdict_of(tiny, "weather")


def test_the_command_prints_each_verdict(tmp_path, capsys):
    settings = parse_settings({"state_dir": str(tmp_path / "state"), "clusters": {"alpha": {}}}, {})
    Store.open(settings.store_url, settings.store_data_path).close()
    print_outcomes(settings, None)
    said = capsys.readouterr().out
    assert said.startswith("alpha: 0 jobs started or ended in the 7 days to ")
    assert " 00:00 UTC, 0 scores kept\n" in said
    assert all(f"  {name} could not judge: too few" in said for name in VERDICTS)


def test_what_publish_keeps_is_what_a_night_joins(store, tmp_path):
    settings = parse_settings({"state_dir": str(tmp_path / "state"), "clusters": {"alpha": {}}}, {})
    queue = Queue(job("p", 0, state="PENDING", nodes=()) | {"planned_start_time": START + seconds(500)})
    ingest_jobs(store, queue, "alpha", START + seconds(20))
    publish_jobs(store, queue, settings, "alpha", START + seconds(20))
    queue.rows = [job("p", 0, 300, state="RUNNING", seen_s=400)]
    publish_jobs(store, queue, settings, "alpha", START + seconds(400))
    queue.rows = [job("p", 0, 300, 900, seen_s=1000)]
    ingest_jobs(store, queue, "alpha", START + seconds(1000))
    score_outcomes(store, "alpha", START + timedelta(days=1))
    found = store.query("SELECT forecast, landmark_s, actual_s, planned_s, state FROM out_outcomes ORDER BY ALL")
    assert found.rows() == [
        ("failure", 0, None, None, "COMPLETED"),
        ("remaining", 0, 500.0, None, "COMPLETED"),
        ("remaining", 60, 500.0, None, "COMPLETED"),
        ("runtime", 0, 600.0, None, "COMPLETED"),
        ("wait", 0, 280.0, 480.0, "COMPLETED"),
    ]


def looked_at(published, *clusters):
    shards = ShardStore(published, clusters)
    shards.refresh()
    return shards


def test_a_damaged_word_of_a_night_is_passed_over_and_a_removed_one_forgotten(tmp_path):
    write_word(tmp_path, "alpha", OutcomesWord(UNTIL, {"inputs_stable": False}, {"runtime_male": 0.5}))
    shards = looked_at(tmp_path, "alpha")
    assert 'weatherglass_outcomes_check_passed{check="inputs_stable",cluster="alpha"} 0.0' in told_by(shards)
    assert "weatherglass_outcomes_figure{" not in told_by(shards, "beta")  # who may not see a cluster sees none of it
    outcomes_path(tmp_path, "alpha").write_text('{"until": "yesterday"}')
    assert shards.refresh()
    assert 'figure="runtime_male"' not in told_by(shards)
    write_word(tmp_path, "alpha", OutcomesWord(UNTIL, {}, {"runtime_male": 0.5}))
    assert shards.refresh()
    assert 'figure="runtime_male"} 0.5' in told_by(shards)
    outcomes_path(tmp_path, "alpha").unlink()
    assert shards.refresh()
    assert not shards.refresh()
    assert 'figure="runtime_male"' not in told_by(shards)


def told_by(shards, cluster="alpha"):
    return Metrics(shards).render([cluster]).decode()


def test_dagster_shows_the_asset_and_its_checks(tmp_path):
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    shift = midnight - UNTIL
    jobs, said = history(run_scale=5.0)
    times = ("submit_time", "eligible_time", "start_time", "end_time", "observed_at")
    with open_store(tmp_path / "state" / "store") as opened:
        fill(
            opened,
            jobs.with_columns(pl.col(times) + shift),
            said.with_columns(pl.col("submit_time", "generated_at", "valid_until") + shift),
        )
    config = tmp_path / "weatherglass.toml"
    config.write_text(f'state_dir = "{tmp_path}/state"\n[clusters.alpha]\n[clusters.beta]\n')
    defs = build_definitions(str(config))
    graph = defs.resolve_asset_graph()
    assert dg.AssetKey("out_outcomes") in defs.resolve_job_def("retrain").asset_layer.executable_asset_keys
    assert graph.get(dg.AssetKey("out_outcomes")).group_name == "trained"
    with dg.instance_for_test() as instance:
        result = defs.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance,
            asset_selection=[dg.AssetKey("out_outcomes"), dg.AssetKey("out_hint_outcomes")],
            raise_on_error=False,
        )
    assert result.success  # checks that fail hold nothing back
    checks = {e.check_name: e for e in result.get_asset_check_evaluations()}
    assert set(checks) == {"went_well", "hints_precise", *VERDICTS}
    assert checks["went_well"].passed
    assert not checks["runtime_calibrated"].passed
    assert checks["runtime_calibrated"].severity == dg.AssetCheckSeverity.ERROR
    assert checks["runtime_calibrated"].description.startswith("alpha: ")
    assert "beta: could not judge: too few" in checks["runtime_calibrated"].description
    # Alpha is stable and of beta nothing can be said: no alert, but not green either.
    assert not checks["inputs_stable"].passed
    assert checks["inputs_stable"].severity == dg.AssetCheckSeverity.WARN
    assert checks["inputs_stable"].description.startswith("beta: could not judge: too few")
    assert checks["inputs_stable"].metadata["passed"].value == 1
    assert judged("out_outcomes", "x", {}, {}, {"alpha": "as usual"}).passed
    shown = Metrics(looked_at(tmp_path / "state" / "published", "alpha", "beta")).render(["alpha", "beta"]).decode()
    assert 'weatherglass_outcomes_check_passed{check="runtime_calibrated",cluster="alpha"} 0.0' in shown
    assert 'weatherglass_outcomes_check_passed{check="inputs_stable",cluster="alpha"} 1.0' in shown
    assert 'check="inputs_stable",cluster="beta"' not in shown  # too few: neither passed nor failed
    assert 'weatherglass_outcomes_figure{cluster="alpha",figure="runtime_male_ratio"}' in shown
    name = 'weatherglass_outcomes_until_timestamp_seconds{cluster="beta"}'
    [until] = [line for line in shown.splitlines() if line.startswith(name)]
    assert float(until.split()[1]) == midnight.timestamp()
    made = next(e for e in result.get_asset_materialization_events() if e.asset_key == dg.AssetKey("out_outcomes"))
    assert made.materialization.metadata["dagster/row_count"].value > 1500
