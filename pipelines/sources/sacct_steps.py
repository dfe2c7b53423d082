"""Steps of jobs, told behind their job: how many, how the last ended, the most memory. Not the jobs themselves.

sacct prints the steps of a record right behind it, under the record's id and a dot; an id may come again in several
records, so a step belongs to the record before it. A job's own state and exit code stay its own: steps can disagree.
"""

from __future__ import annotations

import polars as pl

from pipelines.sources.job_fields import LIVE_STATES, Fields

STEP_COLUMNS = ("steps", "last_step_state", "last_step_exit_code", "max_rss_bytes")
_WITHOUT_SRUN = ("batch", "extern")  # Slurm's own steps: the script, and what came in from outside


def is_step(job_id: pl.Expr) -> pl.Expr:
    """The id of a record is that of a step."""
    return job_id.str.contains(".", literal=True)


def with_steps(text: pl.DataFrame, field: Fields) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Jobs without their steps, and what the steps of each say.

    Args:
        text: Records in the order they were told, as text.
        field: Expressions over its columns.

    Returns:
        The records of jobs; and a row for each of them with `STEP_COLUMNS`, null where no step was told. Steps that
        stand behind no record of their job are left out.
    """
    told = text.with_row_index("_at").with_columns(field.job_id().alias("_id"))
    step = is_step(pl.col("_id")).fill_null(False)
    jobs = told.filter(~step)
    rows = told.with_columns(
        pl.when(~step).then("_at").forward_fill().alias("_of"),
        pl.when(~step).then("_id").forward_fill().alias("_of_id"),
    ).filter(step)
    name = pl.col("_id").str.split_exact(".", 1)
    rows = rows.filter(name.struct[0] == pl.col("_of_id")).select(
        pl.col("_of").alias("_at"),
        (~name.struct[1].is_in(_WITHOUT_SRUN)).alias("is_own"),
        (name.struct[1] != "extern").alias("is_script"),
        field.time("end").alias("end"),
        field.state().alias("state"),
        field.exit_code().alias("exit_code"),
        field.bytes("maxrss").alias("rss"),
    )
    # Of steps that ended within the same second the later told one; one that runs ends after all others.
    rows = rows.sort("is_own", "is_script", "end", nulls_last=True, maintain_order=True)
    last_state = pl.col("state").last()
    of_steps = rows.group_by("_at").agg(
        pl.col("is_own").sum().cast(pl.Int64).alias("steps"),
        last_state.alias("last_step_state"),
        pl.when(~last_state.is_in(LIVE_STATES)).then(pl.col("exit_code").last()).alias("last_step_exit_code"),
        pl.col("rss").max().alias("max_rss_bytes"),
    )
    found = jobs.select("_at").join(of_steps, on="_at", how="left", maintain_order="left")
    return jobs.drop("_at", "_id"), found.select(STEP_COLUMNS)
