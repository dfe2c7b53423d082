"""Figures hold the numbers they were given, in colours that can be told apart: their data, not their pixels."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path

import polars as pl
import pytest

from dashboards import figures, foresight, rack_map, theme
from dashboards.theme import DARK, LIGHT, THEMES, contrast
from dashboards.words import CLASS_WORDS
from features import fleet
from tests import dashboard_world as world

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


# --- cascade and trend --------------------------------------------------------------------------------------------


def test_cascade_takes_each_loss_from_what_is_left():
    good = fleet.goodness({"good": 60, "throttled": 5, "unproductive": 15, "idle": 12, "out": 8})
    figure = figures.cascade(good, LIGHT)
    bars = {bar.y[0]: (bar.base[0], bar.x[0]) for bar in figure.data}
    assert bars == {
        "in the inventory": (0, 100),
        "down or drained": (92, 8),
        "free": (80, 12),
        "allocated, not busy": (65, 15),
        "busy but throttled": (60, 5),
        "busy at full speed": (0, 60),
    }
    assert "busy at full speed 60 GPUs" in figure.layout.meta["label"]


def test_cascade_without_gpus_says_so():
    figure = figures.cascade(fleet.goodness({}), DARK)
    assert len(figure.data) == 0
    assert figure.layout.annotations[0].text == "No GPUs known"


def trend_frame() -> pl.DataFrame:
    tallies = pl.DataFrame(
        {
            "bin": [NOW - timedelta(minutes=m) for m in (20, 15, 5)],
            "cluster": ["sim"] * 3,
            "good": [50.0, 60.0, 40.0],
            "throttled": [0.0, 0.0, 10.0],
            "unproductive": [10.0, 10.0, 20.0],
            "unknown": [0.0] * 3,
            "idle": [40.0, 20.0, 30.0],
        }
    )
    return fleet.trend(tallies, {"sim": 100.0})


def test_trend_bands_are_shares_of_all_gpus_and_a_gap_stays_a_gap():
    figure = figures.trend(trend_frame(), LIGHT, bin_s=300, hours=6)
    bands = {bar.name: list(bar.y) for bar in figure.data}
    assert bands["busy at full speed"] == [50, 60, 40]
    assert bands["down, drained or not reporting"] == [0, 10, 0]
    assert "allocated, activity unknown" not in bands
    sums = [sum(band[i] for band in bands.values()) for i in range(3)]
    assert sums == [100, 100, 100]
    assert list(figure.data[0].x) == ["2026-11-30T11:40:00", "2026-11-30T11:45:00", "2026-11-30T11:55:00"]
    start, end = figure.layout.xaxis.range
    assert end - start == 6 * 3600 * 1000
    assert "lowest 40 %, highest 60 %" in figure.layout.meta["label"]


def test_trend_without_data_says_so():
    empty = fleet.trend(
        trend_frame().select("bin", *("good", "throttled", "unproductive", "unknown", "idle")).head(0), {}
    )
    assert figures.trend(empty, LIGHT, bin_s=300, hours=6).layout.annotations[0].text == "No samples in these hours"


def test_more_gpus_than_the_inventory_knows_do_not_go_beyond_all():
    tallies = pl.DataFrame(
        {"bin": [NOW], "cluster": ["sim"], "good": [120.0], "throttled": [0.0], "unproductive": [0.0], "unknown": [0.0],
         "idle": [0.0]}
    )  # fmt: skip
    row = fleet.trend(tallies, {"sim": 100.0}).row(0, named=True)
    assert (row["gpus"], row["absent"], row["goodness"]) == (120, 0, 1)


# --- the map ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [[("r1", 4)] * 8, [("r1", 8)] * 157, [("r1", 40), ("r2", 3)], [("r", 1)], []])
def test_floor_plan_gives_each_cell_its_own_place(blocks):
    plan = rack_map.floor_plan(blocks)
    assert len(plan.cells) == sum(count for _, count in blocks)
    assert len(set(plan.cells)) == len(plan.cells)
    assert not set(plan.cells) & {(line, column) for line, column, _ in plan.labels}
    assert all(0 <= line < plan.rows and 0 <= column < plan.columns for line, column in plan.cells)
    assert len(plan.labels) == len(blocks)
    assert plan.columns <= 128


def heat(nodes, items, **options):
    foreseen = foresight.select(items)
    values = foresight.bottleneck_values(nodes, foreseen, 120)
    figure = rack_map.heat_map(values, foresight.by_rack(values), LIGHT, title="P", **options)
    return values, figure


def cells(figure, trace=-1):
    heatmaps = [data for data in figure.data if data.type == "heatmap"]
    return {
        name[1]: value
        for names, values in zip(heatmaps[trace].customdata, heatmaps[trace].z, strict=True)
        for name, value in zip(names, values, strict=True)
        if name is not None
    }


def test_map_shows_the_largest_probability_of_each_node():
    nodes = world.nodes_frame(32, NOW)
    items = [
        world.bottleneck(1, node="n3", probabilities={"30": 0.1, "60": 0.2, "90": 0.3, "120": 0.4}),
        world.bottleneck(2, node="n3", bottleneck_class="memory_exhaustion"),
        world.bottleneck(3, node="n4", is_active=True),
    ]
    values, figure = heat(nodes, items)
    found = cells(figure)
    assert len(found) == 32
    assert found["n3"] == 0.91
    assert found["n4"] == 0.0
    assert found["n5"] is None, "out of service, so neither calm nor hot"
    marks = {data.name: len(data.x) for data in figure.data if data.type == "scatter" and data.mode == "markers"}
    assert marks == {"out of service": 1, "condition active now": 1}
    row = values.filter(pl.col("node") == "n3").row(0, named=True)
    assert (row["foreseen"], row["active"], row["what"]) == (2, 0, "memory_exhaustion")
    text = next(t for line in figure.data[1].hovertext for t in line if "<b>n3</b>" in t)
    assert "P: <b>91 %</b>" in text
    assert "Memory exhaustion" in text


def test_map_keeps_nodes_that_only_a_hint_names():
    _, figure = heat(world.nodes_frame(4, NOW), [world.bottleneck(1, node="n99", rack="r9")])
    assert cells(figure)["n99"] == 0.91


def test_map_escapes_names():
    nodes = world.nodes_frame(1, NOW).with_columns(pl.lit("<img src=x>").alias("node"))
    _, figure = heat(nodes, [])
    shown = figure.to_json()
    assert "<b><img" not in shown
    assert "&lt;img" in shown or "\\u0026lt;img" in shown


def test_map_of_a_large_fleet_has_a_cell_per_rack():
    nodes = world.nodes_frame(12_500, NOW, per_rack=8)
    _, figure = heat(nodes, [world.bottleneck(1, node="n17", rack="r3", pod="p1")])
    found = cells(figure)
    assert len(found) == 1563
    assert found["r3"] == 0.91
    assert found["r2"] == 0.0
    assert len(figure.to_json()) < 2_000_000


def test_unknown_is_drawn_as_unknown_not_as_calm():
    nodes = world.nodes_frame(4, NOW)
    values = foresight.risk_values(nodes, [world.risk("n1", 0.2)])
    figure = rack_map.heat_map(values, foresight.by_rack(values), LIGHT, title="P", top=0.2)
    assert cells(figure) == {"n1": 0.2, "n2": None, "n3": None, "n4": None}
    assert {data.name: len(data.x) for data in figure.data if data.type == "scatter" and data.mode == "markers"} == {
        "not known": 3
    }


# --- colours ------------------------------------------------------------------------------------------------------

STATES = ("good", "throttled", "unproductive", "unknown", "idle", "unreported", "out")


@pytest.mark.parametrize("colours", THEMES.values(), ids=THEMES)
def test_text_and_fills_have_the_contrast_that_wcag_asks_for(colours):
    for surface in ("bg", "surface", "sunk"):
        for text in ("ink", "muted", "accent", "ok", "warn", "bad"):
            assert contrast(getattr(colours, text), getattr(colours, surface)) >= 4.5, (text, surface)
    for fill in (*STATES, *CLASS_WORDS):
        assert contrast(getattr(colours, fill), colours.surface) >= 3, fill
    assert contrast(colours.on_accent, colours.accent) >= 4.5


def seen_by(colour: str, matrix) -> tuple[float, float, float]:
    """Linear RGB of a colour as an eye without one kind of cones sees it (Viénot, Brettel and Mollon, 1999)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return tuple(sum(m * c for m, c in zip(row, linear, strict=True)) for row in matrix)


EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red cones": ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)),
    "no green cones": ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)),
}


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("name", THEMES)
def test_states_can_be_told_apart_by_any_eye(name, eye):
    colours = THEMES[name]
    for index, one in enumerate(STATES):
        for other in STATES[index + 1 :]:
            if theme.PATTERNS.get(one) != theme.PATTERNS.get(other):
                continue  # a hatch tells them apart
            seen = [seen_by(getattr(colours, state), EYES[eye]) for state in (one, other)]
            distance = sum((a ** (1 / 2.2) - b ** (1 / 2.2)) ** 2 for a, b in zip(*_positive(seen), strict=True)) ** 0.5
            assert distance > 0.12, (one, other)


@pytest.mark.parametrize("name", THEMES)
def test_classes_of_bottlenecks_can_be_told_apart(name):
    colours = {of: _oklab(getattr(THEMES[name], of)) for of in CLASS_WORDS}
    assert len(colours) == 8
    for one, other in combinations(colours, 2):
        assert math.dist(colours[one], colours[other]) > 0.09, (one, other)


def _oklab(colour):
    """#rrggbb in a space in which equal distances look alike (Ottosson, 2020)."""
    red, green, blue = seen_by(colour, EYES["all cones"])
    long, middle, short = (
        (a * red + b * green + c * blue) ** (1 / 3)
        for a, b, c in (
            (0.41222147, 0.53633254, 0.05144599), (0.21190350, 0.68069955, 0.10739696),
            (0.08830246, 0.28171884, 0.62997870),
        )
    )  # fmt: skip
    return (
        0.21045426 * long + 0.79361779 * middle - 0.00407205 * short,
        1.97799850 * long - 2.42859221 * middle + 0.45059371 * short,
        0.02590404 * long + 0.78277177 * middle - 0.80867577 * short,
    )


def _positive(pair):
    return [[max(0.0, value) for value in colour] for colour in pair]


@pytest.mark.parametrize("colours", THEMES.values(), ids=THEMES)
def test_heat_rises_steadily(colours):
    ratios = [contrast(colour, colours.surface) for colour in (colours.calm, *colours.heat)]
    assert ratios == sorted(ratios)


def test_style_sheet_uses_only_colours_of_the_theme():
    sheet = (Path(theme.__file__).parent / "assets" / "weatherglass.css").read_text()
    for body in re.findall(r"\{([^{}]*)\}", sheet):
        assert not re.search(r"#[0-9a-fA-F]{3,8}\b|rgb|hsl", body), body
    used = set(re.findall(r"var\(--([\w-]+)\)", sheet))
    defined = set(re.findall(r"--([\w-]+):", theme.css_variables()))
    assert used <= defined | {"height"}, "height is set by each place"
    assert "http" not in sheet
