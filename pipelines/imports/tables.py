"""Tables in Parquet or CSV, in batches of rows: columns become those of the registry, value by value.

What cannot be cast becomes null and is counted; a row of a CSV that has another number of fields is dropped. Which
columns a kind wants stands in `jobs.py`, `telemetry.py` and `sensors.py`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import polars as pl

from pipelines.imports import ImportingError, Task
from pipelines.imports.casts import cast_values
from pipelines.imports.lines import HEADER_AGAIN, Line, batches
from pipelines.imports.report import Report

ROW = "_row"
_ROWS = 100_000
_BLANK = ("", "null", "none", "na", "n/a")
_NOT_SAID = ("nan", "nat")  # of texts and times; a number that is none is counted
_DELIMITERS = (",", ";", "\t", "|")


def read_rows(path: Path, task: Task, *, is_multiline: bool = False) -> Iterator[pl.DataFrame]:
    """Rows of a Parquet or CSV file (plain or gzip), with lower-case column names, and ROW: the number of row or line.

    Args:
        path: The file.
        task: The import.
        is_multiline: A quoted text of a CSV may hold newlines.

    Raises:
        ImportingError: It is no table, or has a column twice.
    """
    with path.open("rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    yield from (_parquet(path, task) if is_parquet else _csv(path, task, is_multiline))


def _parquet(path: Path, task: Task) -> Iterator[pl.DataFrame]:
    task.report.what = "rows"
    size = path.stat().st_size
    try:
        scan = pl.scan_parquet(path)
        total = scan.select(pl.len()).collect().item()
        _names(path, scan.collect_schema().names())
        for at in range(0, max(total, 1), _ROWS):
            frame = scan.slice(at, _ROWS).collect()
            frame.columns = _names(path, frame.columns)
            task.report.read += len(frame)
            task.progress(size * len(frame) // max(total, 1))
            yield frame.with_columns(pl.int_range(at + 1, at + 1 + len(frame), dtype=pl.Int64).alias(ROW))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        said = f": {str(error).splitlines()[0][:200]}" if str(error) and isinstance(error, Exception) else ""
        raise ImportingError(f"{path}: no Parquet file that can be read{said}") from None


def _csv(path: Path, task: Task, is_multiline: bool) -> Iterator[pl.DataFrame]:
    names: list[str] = []
    header, delimiter = "", ","
    rest: list[Line] = []
    for batch in batches(path, task.report, task.progress):
        lines = batch
        if not names:
            header = lines[0].text
            delimiter = max(_DELIMITERS, key=header.count)
            names = _header(path, header, delimiter)
            lines = lines[1:]
        again = [line.number for line in lines if line.text == header]
        for number in again:
            task.report.read += 1
            task.report.skip(HEADER_AGAIN, 1, number)
        lines = [*rest, *(line for line in lines if line.text != header)] if again or rest else lines
        read = _records if is_multiline else _single
        records, rest = read(lines, len(names), delimiter, task.report)
        yield _text_frame(records, names)
    if not names:
        raise ImportingError(f"{path}: it is empty, or holds no line that can be read")
    if rest:
        yield _text_frame(_records(rest, len(names), delimiter, task.report, is_last=True)[0], names)


def _header(path: Path, text: str, delimiter: str) -> list[str]:
    try:
        return _names(path, next(csv.reader([text], delimiter=delimiter), []))
    except csv.Error as error:
        raise ImportingError(f"{path}: line 1 is no header: {error}") from None


def _text_frame(records: list[tuple[int, list[str]]], names: list[str]) -> pl.DataFrame:
    frame = pl.DataFrame([fields for _, fields in records], schema=dict.fromkeys(names, pl.String), orient="row")
    return frame.with_columns(pl.Series(ROW, [number for number, _ in records], dtype=pl.Int64))


def _records(
    lines: list[Line], width: int, delimiter: str, report: Report, *, is_last: bool = False
) -> tuple[list[tuple[int, list[str]]], list[Line]]:
    """Records with their line numbers, and the lines of the last one, which may go on in the next batch.

    A quote that is never closed makes one line bad, not all that it would swallow.
    """
    records: list[tuple[int, list[str]]] = []
    start = 0
    while start < len(lines):
        reader = csv.reader((lines[k].text + "\n" for k in range(start, len(lines))), delimiter=delimiter)
        begin, fault = start, ""
        end = start
        try:
            for fields in reader:
                begin, end = end, start + reader.line_num
                if not is_last and end >= len(lines):
                    return records, lines[begin:]
                if end - begin > 1 and not _is_closed(lines[begin:end], width, delimiter):
                    fault = "a quote is not closed"
                    break
                if len(fields) != width:
                    fault = f"not the {width} fields of the header"
                    break
                report.read += 1
                records.append((lines[begin].number, fields))
            else:
                break
        except csv.Error as error:
            begin, fault = end, f"no fields: {error}"
        report.read += 1
        report.drop(fault, 1, lines[begin].number, lines[begin].text)
        start = begin + 1
    return records, []


def _single(
    lines: list[Line], width: int, delimiter: str, report: Report
) -> tuple[list[tuple[int, list[str]]], list[Line]]:
    """The same where a record is a line."""
    records = []
    for line in lines:
        try:
            fields = next(csv.reader([line.text], delimiter=delimiter), [])
        except csv.Error as error:
            fields, fault = [], f"no fields: {error}"
        else:
            fault = f"not the {width} fields of the header"
        report.read += 1
        if len(fields) == width:
            records.append((line.number, fields))
        else:
            report.drop(fault, 1, line.number, line.text)
    return records, []


def _is_closed(lines: list[Line], width: int, delimiter: str) -> bool:
    """Whether lines that were read as one record are one: by the letter, and none of them is a record by itself."""
    try:
        is_one = len(list(csv.reader([line.text + "\n" for line in lines], delimiter=delimiter, strict=True))) == 1
        return is_one and all(len(next(csv.reader([line.text], delimiter=delimiter))) != width for line in lines[1:])
    except csv.Error:
        return False


def _names(path: Path, names: Sequence[str]) -> list[str]:
    lower = [name.strip().lower() for name in names]
    twice = sorted({name for name in lower if lower.count(name) > 1})
    if twice or ROW in lower:
        raise ImportingError(f"{path}: more than one column is named {', '.join(twice) or ROW}")
    return lower


def typed(
    frame: pl.DataFrame, types: Mapping[str, pl.DataType | type[pl.DataType]], task: Task, keys: Sequence[str] = ()
) -> pl.DataFrame:
    """The columns of `types` that the frame has, cast value by value, and ROW.

    Args:
        frame: As given by `read_rows`.
        types: Registry columns and their dtypes.
        task: Values that cannot be cast are counted in its report; its zone is that of times without one.
        keys: Columns whose values are not counted: without them the row goes.
    """
    columns = []
    for name, dtype in types.items():
        if name not in frame.columns:
            continue
        before = _blank_is_null(frame[name], () if dtype.is_numeric() else _NOT_SAID)
        after = cast_values(before, dtype, task.zone).alias(name)
        if dtype.is_float() and name not in keys:
            after = _without_nan(name, after, frame[ROW], task.report)
        if name not in keys:
            _count_lost(name, before, after, frame[ROW], task.report)
        columns.append(after)
    return pl.DataFrame([frame[ROW], *columns])


def _blank_is_null(values: pl.Series, further: tuple[str, ...]) -> pl.Series:
    if values.dtype != pl.String:
        return values
    text = values.str.strip_chars()
    return text.set(text.str.to_lowercase().is_in([*_BLANK, *further]).fill_null(False), None)


def _without_nan(name: str, values: pl.Series, rows: pl.Series, report: Report) -> pl.Series:
    """NaN and infinities become null before anything chooses among values; they are counted with their places."""
    bad = (values.is_nan() | values.is_infinite()).fill_null(False)
    if not bad.any():
        return values
    for place in rows.filter(bad)[:5]:
        report.null(name, "not_a_number", 0, place, str(values.filter(bad)[0]))
    report.null(name, "not_a_number", int(bad.sum()))
    return values.set(bad, None)


def _count_lost(name: str, before: pl.Series, after: pl.Series, rows: pl.Series, report: Report) -> None:
    lost = (after.is_null() & before.is_not_null()).arg_true()
    for i in lost[:5]:
        report.null(name, "cannot be read", 0, rows[i], str(before[i]))
    if len(lost):
        report.null(name, "cannot be read", len(lost))


def unknown_columns(frame: pl.DataFrame, known: Sequence[str], report: Report) -> None:
    """Note the columns that are passed over."""
    extra = [name for name in frame.columns if name not in known and name != ROW]
    if extra:
        shown = ", ".join(extra[:10]) + (f" and {len(extra) - 10} more" if len(extra) > 10 else "")
        report.note(f"columns that are not of the registry were passed over: {shown}")


def without(
    frame: pl.DataFrame, test: pl.Expr, reason: str, report: Report, show: Callable[[dict], object]
) -> pl.DataFrame:
    """The frame without the rows that meet a test, which are counted as dropped."""
    bad = frame.select(test.fill_null(False)).to_series()
    if not bad.any():
        return frame
    wrong = frame.filter(bad)
    for row in wrong.head(5).iter_rows(named=True):
        report.drop(reason, 0, row[ROW], show(row))
    report.drop(reason, len(wrong))
    return frame.filter(~bad)
