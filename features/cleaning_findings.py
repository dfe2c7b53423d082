"""Findings of cleaning: every reason for which a value is not believed, and the rows of `core_data_quality` they make.

Here belong the reasons' names and words, and how they are counted; the judgements themselves stand in the modules that
make them (`cleaning_bounds`, `cleaning_rows`, `cleaning_mig`, `cleaning_series`, `cleaning_ports`).
"""

from __future__ import annotations

import polars as pl

QUALITY_SCHEMA = {"column_name": pl.String, "reason": pl.String, "count": pl.Int64, "example": pl.String}

# Column `ts` stands for the row as a whole.
REASONS: dict[str, str] = {
    "no_key": "The row names no cluster, node, board, link or port; it is dropped.",
    "bad_time": "The time is missing, before 2000 or ahead of the present; the row is dropped.",
    "clock_skew": "All samples of the node are later than the present, or shifted against the other nodes'; kept.",
    "duplicate": "Several rows for one key, as when a job's labels come and go; merged by the largest value.",
    "several_jobs": "Rows of one GPU and time name different jobs; the GPU is shared and the row names none of them.",
    "sentinel": "The exporter's number for a value that is not there: blank, not found, not supported, not permitted.",
    "not_a_number": "NaN or infinite.",
    "out_of_range": "Physically impossible, as 345 °C or a negative rate.",
    "zero_is_missing": "Exactly 0 where 0 cannot be, as a memory at 0 °C.",
    "above_limit": "Power far above the board's own limit.",
    "above_total": "More memory in use than there is.",
    "above_speed": "A rate far above the speed of its port.",
    "saturated": "A 32-bit counter that stands at its end: it has overflowed and tells nothing any more.",
    "late_reading": "A port a little behind its sample before, as of a replica whose clock is off; it has no rates.",
    "zero_on_mig": "Utilisation 0 of a GPU in MIG mode, where the driver does not measure it.",
    "partition_missing": "What only all partitions of an AMD GPU tell together, while not all of them are there.",
    "no_profile": "Activity of a MIG instance whose share of the GPU is not known, or not of all its instances.",
    "zero_under_load": "A traffic counter that never left 0 while the GPU worked.",
    "stuck": "Profiling counters at 0 while utilisation or power say that the GPU works.",
    "frozen": "No quantity changed at all for minutes of work: old values are served again.",
    "first_of_rate": "The 0 that begins a rate made of counters: there was nothing to compare with yet.",
    "gap": "Samples that are missing between those that a series has, or behind its last, by its usual step.",
    "partial": "The source warned that its answer is not whole.",
    "no_samples": "The window has no sample at all.",
}


def count(wrong: pl.DataFrame, column: str, reason: str, *, rows: int | None = None, note: str = "") -> pl.DataFrame:
    """The finding that values of a column are wrong.

    Args:
        wrong: Rows that have it; the first is the example.
        column: Name of the column, `ts` for the row as a whole.
        reason: One of `REASONS`.
        rows: How many, when not the height of `wrong`.
        note: Words behind the example.

    Returns:
        One row of `QUALITY_SCHEMA`, or none when `wrong` is empty.

    Raises:
        KeyError: The reason is not in `REASONS`.
    """
    if reason not in REASONS:
        raise KeyError(f"no reason {reason!r} in REASONS; there are: {', '.join(REASONS)}")
    if wrong.is_empty():
        return pl.DataFrame(schema=QUALITY_SCHEMA)
    first = wrong.row(0, named=True)
    names = ("cluster", "node", "gpu_uuid", "mig_instance", "link", "device", "port")
    example = "/".join(str(first[name]) for name in names if first.get(name) not in (None, ""))
    number = len(wrong) if rows is None else rows
    return pl.DataFrame([(column, reason, number, example + note)], schema=QUALITY_SCHEMA, orient="row")


def without(
    samples: pl.DataFrame, bad: pl.Series, column: str, reason: str, findings: list[pl.DataFrame]
) -> pl.DataFrame:
    """The samples with null in a column where `bad`, counted in `findings`; what is null already does not count."""
    bad = bad.fill_null(False) & samples[column].is_not_null()
    if not bad.any():
        return samples
    findings.append(count(samples.filter(bad), column, reason))
    return samples.with_columns(pl.when(~bad).then(pl.col(column)).alias(column))


def quality(findings: list[pl.DataFrame]) -> pl.DataFrame:
    """One row for each column and reason, sorted by them; counts summed, the first example kept."""
    found = [finding for finding in findings if not finding.is_empty()]
    if not found:
        return pl.DataFrame(schema=QUALITY_SCHEMA)
    summed = pl.concat(found).group_by("column_name", "reason", maintain_order=True)
    return summed.agg(pl.col("count").sum(), pl.col("example").first()).sort("column_name", "reason")
