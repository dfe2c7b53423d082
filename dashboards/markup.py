"""Components of Dash as HTML text, which the browser works into the page without taking it apart.

Dash mounts whatever a callback gives anew: focus, selected text and the scroll of a table would be lost at each
refresh. So the parts of a page that refresh are sent as HTML, and `assets/weatherglass.js` changes only what differs.
Only plain elements can be written; everything in them is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import Any

from dash.development.base_component import Component

_NAMES = {"className": "class", "htmlFor": "for", "key": "data-key"}
_VOID = {"br", "hr", "img", "wbr"}
_CAPITAL = re.compile(r"[A-Z]")
_ATTRIBUTE = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


def markup(content: Any) -> str:
    """HTML of a component of `dash.html`, text, a number, or a list of these; nothing for None.

    Raises:
        TypeError: Something else, as a component of `dash.dcc`, or an attribute that is no text, number or flag.
    """
    if content is None:
        return ""
    if isinstance(content, str | int | float):
        return escape(str(content))
    if isinstance(content, list | tuple):
        return "".join(markup(part) for part in content)
    if isinstance(content, Component) and content._namespace == "dash_html_components":
        return _element(content)
    raise TypeError(f"cannot be written as HTML: {type(content).__module__}.{type(content).__name__}")


def _element(component: Component) -> str:
    tag = component._type.lower()
    properties = dict(component.to_plotly_json()["props"])
    children = properties.pop("children", None)
    attributes = "".join(_attribute(name, value) for name, value in properties.items())
    if tag in _VOID:
        return f"<{tag}{attributes}>"
    return f"<{tag}{attributes}>{markup(children)}</{tag}>"


def _attribute(name: str, value: Any) -> str:
    if not _ATTRIBUTE.fullmatch(name):
        raise TypeError(f"no name of an attribute: {name!r}")
    if value is None or value is False:
        return ""
    written = _NAMES.get(name, name.lower())
    if value is True:
        return f" {written}"
    if name == "style" and isinstance(value, Mapping):
        value = ";".join(f"{_CAPITAL.sub(lambda m: '-' + m[0].lower(), key)}:{text}" for key, text in value.items())
    if not isinstance(value, str | int | float):
        raise TypeError(f"attribute {name} is a {type(value).__name__}; give text, a number or a flag")
    return f' {written}="{escape(str(value))}"'
