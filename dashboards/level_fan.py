"""The course of a level over the next two minutes: a fan of quantiles from the newest reading on, and in words.

Pure functions of a hint's `levels` as the API gives it; colours come from `theme.py`. No reading and no components.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from dashboards.figures import base_figure, empty_figure
from dashboards.theme import Theme
from dashboards.words import is_baseline

HEIGHT = 230
_NAMES = {
    "gpu_temp_c": "Core temperature", "gpu_power_w": "Board power", "fb_free_gib": "Free device memory",
    "nvlink_fill_ratio": "NVLink rate, of the achievable",
}  # fmt: skip
_IN_WORDS_S = "60"


def quantity_words(course: Mapping[str, Any]) -> str:
    """Which quantity a course is of; an unknown one by its own name."""
    name = str(course.get("quantity") or "")
    return _NAMES.get(name, name.replace("_", " "))


def course_words(course: Mapping[str, Any] | None) -> str:
    """`83 °C now, 88–91 °C in 60 s, limit 90 °C`; empty where there is no course."""
    low, high = (_at(course, name).get(_IN_WORDS_S) for name in ("q10", "q90"))
    if course is None or low is None or high is None or course.get("now") is None:
        return ""
    unit, scale, digits = _shown(course)
    ends = [f"{scale * value:.{digits}f}" for value in (low, high)]
    span = ends[0] if ends[0] == ends[1] else "–".join(ends)
    limit = course.get("limit")
    text = f"{scale * course['now']:.{digits}f} {unit} now, {span} {unit} in {_IN_WORDS_S} s"
    return text if limit is None else f"{text}, limit {scale * limit:.{digits}f} {unit}"


def fan(course: Mapping[str, Any] | None, theme: Theme) -> go.Figure:
    """The fan.

    Args:
        course: `levels` of a hint; None: there is none to show.
        theme: Colours.

    Returns:
        Newest reading, median and 80 % interval over seconds from now, with the limit where it is known.
    """
    words = course_words(course)
    if course is None or not words:
        return empty_figure(theme, "No course of a level is foreseen for these hints", 90)
    unit, scale, digits = _shown(course)
    low, middle, high = (_at(course, name) for name in ("q10", "q50", "q90"))
    horizons = sorted((h for h in middle if h in low and h in high), key=float)
    x = [0.0, *(float(h) for h in horizons)]
    now = scale * float(course["now"])
    lows, middles, highs = ([now, *(scale * float(of[h]) for h in horizons)] for of in (low, middle, high))
    limit = None if course.get("limit") is None else scale * float(course["limit"])
    figure = base_figure(theme, height=HEIGHT, label=f"{quantity_words(course)}: {words}")
    figure.add_scatter(x=x, y=highs, mode="lines", line={"width": 0}, hoverinfo="skip")
    figure.add_scatter(
        x=x, y=lows, mode="lines", line={"width": 0}, fill="tonexty", fillcolor=_faint(theme.accent), hoverinfo="skip"
    )
    told = [f"{a:.{digits}f}–{b:.{digits}f} {unit} with 80 %" for a, b in zip(lows, highs, strict=True)]
    figure.add_scatter(
        x=x, y=middles, mode="lines+markers", line={"color": theme.accent, "width": 2.5, "dash": "dash"},
        marker={"size": [9, *([6] * len(horizons))], "color": theme.accent}, customdata=told,
        hovertemplate=f"in %{{x:.0f}} s: %{{y:.{digits}f}} {unit}<br>%{{customdata}}<extra></extra>",
    )  # fmt: skip
    if limit is not None:
        figure.add_hline(y=limit, line={"color": theme.bad, "width": 1.5, "dash": "dot"})
        figure.add_annotation(
            x=x[-1], y=limit, text=f"limit {limit:.{digits}f} {unit}", showarrow=False, xanchor="right",
            yanchor="bottom", font={"color": theme.bad, "size": 12},
        )  # fmt: skip
    figure.add_annotation(
        x=0, y=now, text=f"{now:.{digits}f} {unit} now", showarrow=False, xanchor="left", yanchor="bottom", xshift=8,
        yshift=6, font={"color": theme.ink, "size": 12},
    )  # fmt: skip
    figure.update_xaxes(title={"text": "seconds from now"}, tickvals=x, range=[-3, x[-1] + 3])
    ends = [*lows, *highs, *([] if limit is None else [limit])]
    room = 0.12 * (max(ends) - min(ends)) or 1.0
    figure.update_yaxes(title={"text": unit}, range=[min(ends) - room, max(ends) + room])
    return figure


def source_words(course: Mapping[str, Any]) -> str:
    """What the forecast rests on, in a sentence."""
    version = str(course.get("model_version") or "")
    if is_baseline(version):
        return "Taken to stay, within what it moved by in the last minutes: no model has earned the place yet."
    return f"By {version}; dashed: the median, shaded: with 80 %."


def _shown(course: Mapping[str, Any]) -> tuple[str, float, int]:
    """Unit, factor and digits that people read a quantity in."""
    unit = str(course.get("unit") or "")
    return ("%", 100.0, 0) if unit == "ratio" else (unit, 1.0, 1 if unit == "GiB" else 0)


def _at(course: Mapping[str, Any] | None, name: str) -> Mapping[str, float]:
    found = (course or {}).get(name)
    return found if isinstance(found, Mapping) else {}


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.22)"
