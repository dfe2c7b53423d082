"""What stands between the fields of a table as text: whether it is a comma, which readers of CSV files want.

Here belongs telling the separator from a header; no reading of rows. `weatherglass import` takes other separators too
(`pipelines/imports/tables.py`).
"""

from __future__ import annotations

from pathlib import Path

_OTHERS = {";": "';'", "\t": "tabs", "|": "'|'"}
_MOST_BYTES = 65_536


def other_separator(header: str) -> str:
    """What is wrong with the separator of a header, in words; empty where it is the comma, or cannot be told.

    Args:
        header: The first line of the file.
    """
    found = max(_OTHERS, key=header.count)
    if header.count(found) <= header.count(","):
        return ""
    return f"its fields have {_OTHERS[found]} between them: give a CSV with commas"


def separator_of_file(path: Path) -> str:
    """The same of a file's first line.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return other_separator(file.readline(_MOST_BYTES).decode("utf-8", "replace"))
