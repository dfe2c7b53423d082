"""The fan of a level's course, in words and as a figure."""

import msgspec
import pytest

from dashboards.bottlenecks_parts import active_table
from dashboards.filters import Filters
from dashboards.foresight import Foreseen
from dashboards.level_fan import HEIGHT, course_words, fan, quantity_words, source_words
from dashboards.level_parts import course_head, told_hint
from dashboards.markup import markup
from dashboards.theme import DARK, LIGHT
from scheduler_hints.schema import LevelCourse
from tests import dashboard_world as world

HOT = {
    "gpu_uuid": "GPU-5f", "quantity": "gpu_temp_c", "unit": "°C", "now": 83.0, "limit": 90.0,
    "q10": {"30": 84.2, "60": 87.6, "90": 88.4, "120": 88.9}, "q50": {"30": 85.6, "60": 89.2, "90": 90.7, "120": 91.4},
    "q90": {"30": 86.9, "60": 90.8, "90": 92.6, "120": 93.5}, "model_version": "level-1",
}  # fmt: skip
LEVELS = {"q10": 0.79, "q50": 0.81, "q90": 0.84}
FULL = HOT | {name: dict.fromkeys(HOT["q10"], value) for name, value in LEVELS.items()}
FULL |= {"quantity": "nvlink_fill_ratio", "unit": "ratio", "now": 0.81, "limit": 0.9}
FULL |= {"model_version": "baseline:persistence"}


def test_words_are_those_of_an_operator():
    assert course_words(HOT) == "83 °C now, 88–91 °C in 60 s, limit 90 °C"
    assert course_words(FULL) == "81 % now, 79–84 % in 60 s, limit 90 %"
    assert course_words(HOT | {"limit": None}) == "83 °C now, 88–91 °C in 60 s"
    assert course_words(None) == ""
    assert course_words({"quantity": "x"}) == ""
    assert quantity_words(HOT) == "Core temperature"
    assert "level-1" in source_words(HOT)
    assert "no model has earned the place" in source_words(FULL)
    msgspec.convert(HOT, LevelCourse)  # the shape that is published


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_the_fan_begins_at_the_reading_and_shows_interval_and_limit(theme):
    figure = fan(HOT, theme)
    high, low, middle = figure.data
    assert list(middle.x) == [0, 30, 60, 90, 120]
    assert list(middle.y) == [83.0, 85.6, 89.2, 90.7, 91.4]
    assert high.y[0] == low.y[0] == 83.0
    assert all(a <= b <= c for a, b, c in zip(low.y, middle.y, high.y, strict=True))
    assert low.fill == "tonexty"
    (limit,) = figure.layout.shapes
    assert limit.y0 == limit.y1 == 90.0
    assert figure.layout.meta["label"] == "Core temperature: 83 °C now, 88–91 °C in 60 s, limit 90 °C"
    assert {note.text for note in figure.layout.annotations} == {"limit 90 °C", "83 °C now"}
    first, last = figure.layout.yaxis.range
    assert first < 83.0
    assert last > 93.5
    assert figure.layout.height == HEIGHT


def test_without_a_course_the_figure_says_so():
    figure = fan(None, LIGHT)
    assert not figure.data
    assert "No course of a level" in figure.layout.annotations[0].text
    assert fan(HOT | {"limit": None}, LIGHT).layout.shapes == ()


def test_the_hint_of_the_address_is_shown_else_the_most_urgent_with_a_course():
    items = [{"id": "a", "levels": None}, {"id": "b", "levels": HOT, "node": "n1"}, {"id": "c", "levels": FULL}]
    foreseen = Foreseen(coming=items[:2], active=items[2:])
    asked = Filters({}, [])
    assert told_hint(foreseen, asked)["id"] == "b"
    assert told_hint(foreseen, Filters({"hint": "c"}, []))["id"] == "c"
    assert told_hint(foreseen, Filters({"hint": "gone"}, []))["id"] == "b"
    assert told_hint(Foreseen(coming=[items[0]], active=[]), asked) is None
    assert "n1 GPU-5f: 83 °C now" in str(course_head(items[1]))
    assert "could be followed" in str(course_head(None))


def test_what_is_active_leads_to_its_course_too_at_any_width():
    items = [world.bottleneck(1, is_active=True, levels=HOT), world.bottleneck(2, is_active=True)]
    made = markup(active_table(Foreseen(coming=[], active=items), {}, Filters({}, []), several=False))
    assert made.count(f"hint={items[0]['id']}") == 2  # in the column of reasons, and below the class where it is narrow
    assert made.count("83 °C now, 88–91 °C in 60 s") == 2
    assert f"hint={items[1]['id']}" not in made
