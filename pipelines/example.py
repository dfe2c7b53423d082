"""Writes `weatherglass.example.toml` from the settings classes, so that the file and the program cannot disagree."""

from __future__ import annotations

from typing import Any, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from pipelines.settings import Cluster, Settings

_HEAD = """\
# Weatherglass settings. Every setting stands here with its default, unit and meaning; all are optional but [clusters].
# Copy to weatherglass.toml and change what differs. An environment variable overrides a setting:
#   WEATHERGLASS_API__PORT=8080      is   [api] port = 8080
#   WEATHERGLASS_CONFIG=/etc/weatherglass.toml chooses the file.
# Two underscores stand between section and name. A variable that begins with WEATHERGLASS_ and is no setting is
# refused, deliberately: a misspelt one would be ignored otherwise. (Kubernetes adds such variables for a Service of
# that name: set `enableServiceLinks: false`.)
# This file is generated: `weatherglass config example > weatherglass.example.toml`.
"""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return str(value)


def _limits(info: FieldInfo) -> str:
    """Valid choices or range of a setting, in words."""
    annotation = info.annotation
    if str(get_origin(annotation)) == "typing.Literal":
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    words = []
    for item in info.metadata:
        if isinstance(item, annotated_types.Gt):
            words.append(f"> {item.gt}")
        if isinstance(item, annotated_types.Ge):
            words.append(f">= {item.ge}")
        if isinstance(item, annotated_types.Le):
            words.append(f"<= {item.le}")
        if isinstance(item, annotated_types.Lt):
            words.append(f"< {item.lt}")
    return " and ".join(words)


def _lines(section: Any, comment: str = "") -> list[str]:
    lines = []
    for name, info in section.model_fields.items():
        limits = _limits(info)
        lines.append(f"# {info.description}{f' ({limits})' if limits else ''}")
        lines.append(f"{comment}{name} = {_toml(info.default)}")
    return lines


def example() -> str:
    """The text of `weatherglass.example.toml`."""
    top, sections = [], []
    for name, info in Settings.model_fields.items():
        if info.default_factory is None:
            limits = _limits(info)
            top += [f"# {info.description}{f' ({limits})' if limits else ''}", f"{name} = {_toml(info.default)}"]
        elif name != "clusters":
            section = info.annotation
            sections += ["", f"# {(section.__doc__ or '').strip()}", f"[{name}]", *_lines(section)]
    clusters = ["", f"# {(Cluster.__doc__ or '').strip()} Repeat the block, with another name, for each cluster."]
    clusters += ["[clusters.prod]", *_lines(Cluster)]
    return "\n".join([_HEAD, *top, *clusters, *sections, ""])
