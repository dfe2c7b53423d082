"""The printed form of what a night says of published forecasts, for the command line.

The figures come from `pipelines/outcomes.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime

from pipelines.compose import CommandError, clusters_of, open_store
from pipelines.outcomes import SPAN
from pipelines.settings import Settings
from pipelines.steps import score_outcomes_of
from pipelines.words import counted, without_name


def print_outcomes(settings: Settings, cluster: str | None, *, is_so_far: bool = False) -> None:
    """Join published forecasts to what came, keep and print what is to be thought of them.

    Args:
        settings: All settings.
        cluster: Name of a cluster; None: every one.
        is_so_far: Of the seven days that end now, of which nothing is kept.

    Raises:
        CommandError: The outcomes of a cluster could not be scored; the others were.
    """
    errors = []
    names = clusters_of(settings, cluster)
    with open_store(settings, read_only=is_so_far, must_exist=True) as store:
        for name in names:
            report = score_outcomes_of(store, settings, name, datetime.now(UTC), is_so_far=is_so_far)
            if report.error:
                errors.append(f"{name}: {without_name(name, report.error)}")
                continue
            fate = "made" if is_so_far else "kept"
            span = f" in the {SPAN.days} days to {report.until:%Y-%m-%d %H:%M} UTC" if report.until else ""
            moved = f"{counted(report.jobs, 'job')} started or ended{span}"
            print(f"{name}: {moved}, {counted(report.scores, 'score')} {fate}")
            if report.covered:
                print(f"  {report.covered}")
            for verdict in report.verdicts:
                print(f"  {verdict.name} {verdict.fate}: {verdict.words}", flush=True)
            for words in (*report.kinds, *report.starts, *report.demand, *report.hints):
                print(f"  {words}", flush=True)
    if errors:
        raise CommandError("\n".join(errors))
