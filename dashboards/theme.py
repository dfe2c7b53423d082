"""Colours of the pages and figures, light and dark, in one place; the style sheet's variables are made from here.

Here belong colours and what they stand for; no layout. Every text colour has a contrast of 4.5 at least against the
surfaces it stands on, every fill that carries meaning 3 at least, and states differ in lightness or pattern as well as
in hue, so that they can be told apart with any colour vision (a test holds both).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

ThemeName = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one theme, as #rrggbb. `heat` runs from calm to certain and rises steadily in contrast."""

    bg: str
    surface: str
    sunk: str
    line: str
    grid: str
    ink: str
    muted: str
    accent: str
    on_accent: str
    ok: str
    warn: str
    bad: str
    good: str
    throttled: str
    unproductive: str
    unknown: str
    idle: str
    unreported: str
    out: str
    thermal_throttle: str
    power_throttle: str
    nvlink_saturation: str
    memory_exhaustion: str
    straggler: str
    host_memory: str
    fabric_congestion: str
    shortage: str
    calm: str
    heat: tuple[str, ...]


LIGHT = Theme(
    bg="#f3f5f7",
    surface="#ffffff",
    sunk="#eef1f4",
    line="#d5dce3",
    grid="#e6ebf0",
    ink="#15202b",
    muted="#51606e",
    accent="#0a5c9e",
    on_accent="#ffffff",
    ok="#0f766e",
    warn="#8f5500",
    bad="#b3261e",
    good="#0b6bb0",
    throttled="#a3330a",
    unproductive="#b57504",
    unknown="#8a5ba6",
    idle="#7c8fa1",
    unreported="#5d6b78",
    out="#3f4c59",
    thermal_throttle="#b83a0a",
    power_throttle="#7a5c00",
    nvlink_saturation="#6d3fa0",
    memory_exhaustion="#0b6bb0",
    straggler="#35750f",
    host_memory="#0f766e",
    fabric_congestion="#a3246b",
    shortage="#5c4433",
    calm="#e3e9ee",
    heat=("#f7d9a8", "#f0a955", "#dd7420", "#b04a0c", "#7a2606"),
)

DARK = Theme(
    bg="#0c131a",
    surface="#141d26",
    sunk="#1b2733",
    line="#2c3a48",
    grid="#22303c",
    ink="#e6edf3",
    muted="#9db0c1",
    accent="#6cb6ff",
    on_accent="#0c131a",
    ok="#4fd1c5",
    warn="#f0b441",
    bad="#ff8a80",
    good="#4a9fe0",
    throttled="#f2783c",
    unproductive="#e3ac34",
    unknown="#c39be0",
    idle="#6d8296",
    unreported="#8c9aa7",
    out="#b4bfca",
    thermal_throttle="#f58a55",
    power_throttle="#e8cf5a",
    nvlink_saturation="#c7a2ee",
    memory_exhaustion="#5db0ee",
    straggler="#8fd14f",
    host_memory="#4fd1c5",
    fabric_congestion="#f279bb",
    shortage="#c9a98a",
    calm="#22303c",
    heat=("#6b3a14", "#9c4f16", "#cf6c22", "#f29a4b", "#ffd9a6"),
)

THEMES: dict[str, Theme] = {"light": LIGHT, "dark": DARK}

# States that a hatch tells apart where hue and lightness may not.
PATTERNS = {"out": "/", "unreported": ".", "unknown": "x"}

FONT = '"Inter", "Segoe UI", "Helvetica Neue", "Liberation Sans", Arial, system-ui, sans-serif'
MONO = 'ui-monospace, "SF Mono", "Cascadia Mono", "Liberation Mono", Menlo, Consolas, monospace'


def theme(name: str | None) -> Theme:
    """Theme by name; light for a name that is not known."""
    return THEMES.get(name or "", LIGHT)


def css_variables() -> str:
    """The style sheet's variables: light, dark where the system asks for it, and either where the reader chose it."""

    def block(colours: Theme) -> str:
        lines = []
        for spec in fields(colours):
            value = getattr(colours, spec.name)
            name = spec.name.replace("_", "-")
            if isinstance(value, tuple):
                lines += [f"--{name}-{index}:{colour}" for index, colour in enumerate(value)]
            else:
                lines.append(f"--{name}:{value}")
        return ";".join(lines)

    light = f"{block(LIGHT)};color-scheme:light"
    dark = f"{block(DARK)};color-scheme:dark"
    return (
        f":root{{{light};--font:{FONT};--mono:{MONO}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=dark]{{{dark}}}"
    )


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, 0–1, as WCAG defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1–21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
