"""Reports of events and levels in words with units, on the page and in the terminal; separators that are no commas."""

from datetime import UTC, datetime

import polars as pl
import pytest

from dashboards.event_page import event_page
from models import node_failure, shortage, straggler
from models.backtest_report import Score
from models.event_report import EventReport
from models.event_words import BASELINES, MEASURES, figure_of, measure_of, shown_unit, subject_words
from models.level import BASELINES as LEVEL_BASELINES
from models.naive_onsets import NAMES
from models.promotion import Interval
from pipelines.backtesting import BacktestError, read_jobs_file
from pipelines.event_backtesting import CLASSES, EventBacktestError, read_record
from pipelines.sources import SourceError
from pipelines.sources.inventory import read_inventory

START = datetime(2026, 3, 2, tzinfo=UTC)


def score(metric, value, who="", low=None, high=None):
    return Score(metric, who, Interval(value, low, high, 40), 100)


def report(kind, subject, scores, calibration=()):
    return EventReport(
        kind=kind, subject=subject, unit="GPU", start=START, end=START, train_end=None, units=1, rows=100,
        onsets=None if kind == "level" else 3, scores=scores, calibration=list(calibration),
    )  # fmt: skip


LEVEL = report(
    "level", "fb_used_bytes",
    [
        score("mae_60s", 2.5e9), score("mae_60s", 5e9, "persistence"), score("coverage_80pct_60s", 0.81),
        score("mae_60s_ratio", 0.5, "persistence", 0.4, 0.6),
        score("mae_60s_moving", 3.25e9), score("mae_60s_moving_ratio", 0.6, "persistence", 0.5, 1.1),
    ],
    [{"horizon_s": 60.0, "forecast": q, "observed": q, "count": 100} for q in (0.1, 0.5, 0.9)],
)  # fmt: skip
ONSETS = report(
    "bottleneck", "shortage",
    [
        score("average_precision_5min", 0.06), score("average_precision_5min", 0.05, "since_last_short"),
        score("average_precision_5min_ratio", 1.2, "since_last_short", 1.1, 1.3),
        score("brier_skill_5min", 0.2, "ewma"),
    ],
)  # fmt: skip


def test_every_baseline_and_figure_has_words():
    names = {*LEVEL_BASELINES, *NAMES, *shortage.BASELINES, *straggler.BASELINES, *node_failure.BASELINES, "ceiling"}
    assert names <= set(BASELINES)
    assert all(words != name for name, (words, _) in BASELINES.items() if "_" in name)
    for name in CLASSES:
        assert "_" not in subject_words(name)
    assert figure_of("mae_60s_moving_ratio").stem == "mae"
    assert figure_of("top_5pct_share_of_faults_7d").stem in MEASURES
    assert figure_of("odd").stem == "odd"
    assert measure_of("mae", "gpu_temp_c").label == "error of the point, °C"
    assert shown_unit("nvlink_tx_bytes_per_s") == ("GB/s", 1e-9)


@pytest.mark.parametrize("told", [LEVEL, ONSETS])
def test_page_and_text_speak_in_words(told):
    page, text = event_page(told, "x"), told.text()
    visible = page.split("<script")[0] + page.rsplit("</script>", 1)[-1]
    for raw in dict.fromkeys(s.metric for s in told.scores):
        assert raw not in visible
        assert raw not in text
    for raw in ("fb_used_bytes", "since_last_short<", "_moving"):
        assert raw not in visible


def test_levels_stand_in_units_that_people_read():
    page, text = event_page(LEVEL, "x"), LEVEL.text()
    assert "<h1>Device memory in use, GB, backtest on x</h1>" in page
    assert "<td>error of the point, GB, 60 s ahead ↓</td><td>2.500</td><td>5.000</td>" in page
    assert "error of the point, GB, 60 s ahead, GPUs at work ↓" in text
    assert "inside the 10–90 % interval, 60 s ahead → 0.80" in text
    assert "quantile stated" in page  # of the reliability
    assert (
        "Error of the point, GB, 60 s ahead, GPUs at work: not clearly other than the best baseline (stays as it is), "
        "0.600 [0.500, 1.100]"
    ) in page


def test_onsets_say_whether_the_model_is_better():
    page = event_page(ONSETS, "x")
    assert "Average precision, within 5 min: better than the best baseline (since last short), 1.200 [1.100," in page
    assert "skill: 1 − Brier ÷ the baseline&#x27;s, within 5 min ↑" in page


@pytest.mark.parametrize(("mark", "named"), [(";", "';'"), ("\t", "tabs"), ("|", "'|'")])
def test_a_separator_that_is_no_comma_is_named(tmp_path, mark, named):
    path = tmp_path / "x.csv"
    frame = pl.DataFrame({"job_id": ["1"], "submit_time": ["2026-01-01 00:00:00"], "note": ["a,b,c,d"]})
    frame.write_csv(path, separator=mark)
    words = f"fields have {named.replace('|', '[|]')} between them: give a CSV with commas"
    with pytest.raises(BacktestError, match=words):
        read_jobs_file(path)
    with pytest.raises(EventBacktestError, match=words):
        read_record(path, "telemetry")
    path.write_text(mark.join(("node", "rack")) + "\n" + mark.join(("n1", "r1")))
    with pytest.raises(SourceError, match=words):
        read_inventory(str(path))


def test_one_column_and_quoted_marks_are_read_as_before(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("node\nn[1-3]\n")
    assert read_inventory(str(path)).height == 3
    path.write_text('"ts","a;b"\n2026-01-31T12:00:00Z,2\n')
    assert read_record(path, "telemetry").height == 1
