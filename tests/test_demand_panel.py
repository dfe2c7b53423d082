"""The panel of demand ahead: what the fan draws, what is chosen, what is said where nothing is known."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest

from dashboards.demand_panel import about, capacities, chosen, demand_fan, demand_table, demands, no_forecast, place_of
from dashboards.filters import Filters
from dashboards.hints_reading import HintList
from dashboards.markup import markup
from dashboards.theme import DARK, LIGHT
from tests import dashboard_world as world

NOW = datetime(2026, 11, 30, 14, 20, tzinfo=UTC)
HOUR = NOW.replace(minute=0)


def items() -> list[dict]:
    night = {
        "start": (HOUR + timedelta(hours=6)).isoformat(), "end": (HOUR + timedelta(hours=12)).isoformat(),
        "units": 24, "confidence": 0.87,
    }  # fmt: skip
    return [
        *world.demand("serve", 40, begin=HOUR, reclaimable=[night]),
        *world.demand(None, 200, begin=HOUR),
        *world.demand("train", 160, begin=HOUR),
        *world.demand("train", 9, begin=HOUR, quantity="arrivals", unit="jobs"),
    ]


def traces(figure: Any) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data if trace.name}


def test_queues_come_by_what_they_will_ask_for() -> None:
    found = demands(items(), {world.CLUSTER: 248.0})
    assert [d.queue for d in found] == [None, "train", "serve"]
    assert [len(d.rows) for d in found] == [9, 9, 9]
    assert [len(d.windows) for d in found] == [0, 0, 1]
    assert chosen(found, Filters()) is found[0]
    assert chosen(found, Filters({"queue": "serve"})) is found[2]
    assert chosen(found, Filters({"queue": "gone"})) is found[0]
    assert chosen([], Filters()) is None


def test_the_fan_opens_from_the_last_value_and_holds_what_the_api_said() -> None:
    shown = demands(items(), {world.CLUSTER: 248.0})[0]
    figure = demand_fan(shown, LIGHT)
    drawn = traces(figure)
    assert list(drawn["median"].x) == [float(place) for place in range(10)]
    assert drawn["median"].y[0] == 196
    assert set(drawn["median"].y[1:]) == {200.0}
    wide = drawn["8 of 10 cases"]
    assert wide.y[0] == 196
    assert list(wide.y[1:]) == [row["q90"] for row in shown.rows]
    assert list(drawn["a week before each"].y) == [206] * 9
    assert set(drawn["in service now"].y) == {248.0}
    assert figure.layout.yaxis.range[1] > 248
    assert figure.layout.xaxis.ticktext[-1] == "2 wk"
    assert "248 GPUs are in service" in figure.layout.meta["label"]
    assert "Demand ahead of all queues in sim: 196 GPUs now" in figure.layout.meta["label"]


def test_windows_lie_where_their_hours_are() -> None:
    assert [place_of(hours) for hours in (0, 1, 2, 18, 336)] == [0, 1, 1.5, 4.5, 9]
    serve = demands(items(), {})[2]
    figure = demand_fan(serve, DARK)
    (window,) = figure.layout.shapes
    assert (window.x0, window.x1) == (3, 4)
    assert [note.text for note in figure.layout.annotations] == ["24 free"]
    assert "in service now" not in traces(figure)  # the capacity is not known


def test_a_capacity_far_above_a_small_queue_is_told_and_not_drawn() -> None:
    serve = demands(items(), {world.CLUSTER: 100_000.0})[2]
    assert "in service now" not in traces(demand_fan(serve, LIGHT))
    hints = HintList("fresh", generated_at=NOW - timedelta(minutes=7))
    text = markup(about(serve, hints, NOW, several=False))
    assert "100,000 GPUs of the cluster are in service" in text
    assert "7 min" in text
    assert "demand-experts-2" in text
    for held, told in ((198.0, "more will be asked for in 1 h"), (150.0, "196 GPUs are asked for already")):
        tight = demands(items(), {world.CLUSTER: held})[0]
        assert told in markup(about(tight, hints, NOW, several=False))


def test_demand_in_cpus_has_no_gpus_beside_it() -> None:
    (cpus,) = demands(world.demand(None, 50, begin=HOUR, unit="cpus"), {world.CLUSTER: 248.0})
    assert cpus.capacity is None
    assert demand_fan(cpus, LIGHT).layout.yaxis.title.text == "CPUs"
    assert cpus.amount(3.04) == "3 CPUs"


def test_the_table_tells_the_interval_and_the_next_window() -> None:
    text = markup(demand_table(demands(items(), {}), several=False))
    assert "24 from Mon 20:00 to Tue 02:00 UTC" in text
    assert "held 87 %" in text
    assert "(185–215)" in text  # all queues in an hour


def test_names_of_queues_are_text() -> None:
    (odd,) = demands(world.demand("<b>x</b>", 50, begin=HOUR), {})
    assert "<b>x" not in markup(demand_table([odd], several=False))


def test_without_a_forecast_the_reason_is_told() -> None:
    told, figure = no_forecast(HintList("stale", message="no cluster has fresh demand"), LIGHT)
    assert "No cluster has fresh demand." in markup(told)
    assert figure.layout.annotations[0].text == "No forecast of demand"


def test_capacity_is_what_is_not_down() -> None:
    class Now:
        states = pl.DataFrame({"cluster": ["a", "a", "b"], "gpus": [8, 8, 4], "out": [8.0, 0.0, 0.0]})

    assert capacities(Now) == pytest.approx({"a": 8.0, "b": 4.0})  # ty: ignore[invalid-argument-type]
