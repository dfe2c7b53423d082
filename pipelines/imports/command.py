"""The command `weatherglass import`: opens the target, shows the progress, prints the report. No logic of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from pipelines.imports.report import Report

_SHOW_FROM_BYTES = 20 << 20


def import_from(
    kind: str,
    path: Path,
    cluster: str,
    out: Path | None,
    settings: Callable[[], Any],
    *,
    at: datetime | None = None,
    zone: str = "UTC",
    node: str = "",
) -> bool:
    """Import files and print the report.

    Args:
        kind: One of `imports.KINDS`.
        path: A file or a folder.
        cluster: Name that all rows get; one of the settings when they go to the store.
        out: A Parquet file to write; None: the store.
        settings: Gives the settings; asked only when the store is wanted.
        at: Time of scrapes that tell none.
        zone: Time zone of times that are written without one.
        node: Node of exporter pages whose labels do not name it.

    Returns:
        Whether something was kept.

    Raises:
        UsageError: The kind does not use an option that was given.
        ImportingError: The files cannot be read at all, or the output cannot be written.
        SettingsError: The settings are wrong or do not know the cluster.
        MetricError: One of the cluster's own mappings of metrics makes no sense.
        StoreError: The store cannot be opened or written.
    """
    from pipelines.imports import ImportingError, OptionError, check_options

    try:
        check_options(kind, at=at is not None, node=bool(node), zone=zone != "UTC")
        report = _imported(kind, path, cluster, out, settings, {"at": at, "zone": zone, "node": node})
    except OptionError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise ImportingError(f"{error.filename or path}: {error.strerror or error}") from None
    except (KeyboardInterrupt, Exception) as error:
        from pipelines.store_errors import is_interrupt

        if not is_interrupt(error):
            raise
        kept = "nothing was written" if out is not None else "what is in the store stays; the same command completes it"
        click.echo(f"weatherglass: interrupted; {kept}", err=True)
        raise SystemExit(130) from None
    click.echo(report.text())
    if not report.rows:
        click.echo(
            f"weatherglass: {path}: nothing of it could be used, and nothing was written{_hint(report)}", err=True
        )
    return report.rows > 0


def _imported(
    kind: str, path: Path, cluster: str, out: Path | None, settings: Callable[[], Any], options: dict[str, Any]
) -> Report:
    from features.metrics import DEFAULT
    from pipelines.importing import files_of, import_files
    from pipelines.imports.targets import ParquetTarget, StoreTarget, check_output

    files = files_of(kind, path)
    vocabulary = DEFAULT
    with contextlib.ExitStack() as stack:
        if out is not None:
            check_output(out, files)
            target: Any = ParquetTarget(out)
            scratch = out.parent
        else:
            from pipelines.compose import open_store

            told = settings()
            vocabulary = told.cluster(cluster).metric_table()
            target = StoreTarget(stack.enter_context(open_store(told)), cluster, path.name)
            scratch = told.state
        stack.callback(target.close)
        progress = stack.enter_context(_progress(sum(file.stat().st_size for file in files), path.name))
        return import_files(kind, path, cluster, target, scratch, vocabulary=vocabulary, progress=progress, **options)


def _hint(report: Report) -> str:
    if not report.read and not report.dropped:
        return ": it holds no data"
    if report.passed and not report.dropped:
        return ": all of it is of no use here"
    return f". Is it of the kind {report.kind}?"


@contextlib.contextmanager
def _progress(size: int, label: str) -> Generator[Callable[[int], None]]:
    """A bar on a terminal, for what takes long."""
    if size < _SHOW_FROM_BYTES or not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=size, label=label, file=sys.stderr) as bar:
        yield bar.update
