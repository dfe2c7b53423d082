"""Device memory that jobs were given against what they used at most: per job, and by user and name family.

The peak of a job is the highest reading of any of its GPUs. It bounds the need from above where an allocator keeps what
it once had, and from below where a spike fell between two readings; hence the headroom. Here belong these sums; samples
are read and sums printed by `pipelines/memory_report.py`; what a job would need by its model: `models/memory.py`.

Pure functions of frames.
"""

from __future__ import annotations

from datetime import datetime

import polars as pl

HEADROOM = 0.10  # of the peak, for spikes between two readings
MIN_SAMPLES = 3  # of a GPU before its peak says anything
# Shares of a GPU's memory that MIG profiles of an 80 GB GPU have: 1g.10gb, 2g.20gb, 3g.40gb and 4g.40gb, all of it.
SHARES = (0.125, 0.25, 0.5, 1.0)
_FAMILY = pl.col("name").str.to_lowercase().str.replace_all(r"[0-9]+", "#")

PEAKS: dict[str, pl.DataType | type[pl.DataType]] = {
    "job_id": pl.String, "node": pl.String, "gpu_uuid": pl.String, "peak_bytes": pl.Float64,
    "capacity_bytes": pl.Float64, "samples": pl.Int64,
}  # fmt: skip


def memory_of_jobs(peaks: pl.DataFrame, jobs: pl.DataFrame, begin: datetime, end: datetime) -> pl.DataFrame:
    """Requested and used device memory of each job that had GPUs in a span.

    Args:
        peaks: Columns of `PEAKS`, one row for a job and GPU: highest memory in use, memory in all (null where no one
            knows), readings.
        jobs: `job_id`, `submit_time`, `user`, `name`, `gpus`, `state`, `start_time`, `end_time`; of one id the newest
            counts. Jobs without GPUs are passed over.
        begin: Start of the span, UTC.
        end: End of the span, UTC.

    Returns:
        `job_id`, `user`, `name`, `family` (the name without digits), `gpus` asked for, `gpus_seen`, `state`,
        `gpu_hours` within the span, `peak_bytes`, `capacity_bytes` of one GPU, `used_ratio`, `share` (the smallest of
        `SHARES` that would hold the peak with headroom). Peak, ratio and share are null where a job was seen on fewer
        GPUs than it asked for, or a GPU of it fewer than `MIN_SAMPLES` times; ratio and share also where the capacity
        is unknown.
    """
    ran = jobs.filter((pl.col("gpus") > 0) & pl.col("start_time").is_not_null())
    ran = ran.sort("submit_time").unique("job_id", keep="last", maintain_order=True)
    first = pl.max_horizontal("start_time", pl.lit(begin))
    last = pl.min_horizontal(pl.col("end_time").fill_null(end), pl.lit(end))
    hours = (last - first).dt.total_seconds(fractional=True) / 3600 * pl.col("gpus")
    ran = ran.with_columns(gpu_hours=hours, family=_FAMILY).filter(pl.col("gpu_hours") > 0)
    seen = peaks.group_by("job_id").agg(
        pl.len().cast(pl.Int64).alias("gpus_seen"), pl.col("samples").min(), pl.col("peak_bytes").max(),
        pl.when(pl.col("capacity_bytes").is_not_null().all()).then(pl.col("capacity_bytes").min()).first()
        .alias("capacity_bytes"),
    )  # fmt: skip
    known = (pl.col("gpus_seen") >= pl.col("gpus")) & (pl.col("samples") >= MIN_SAMPLES)
    found = ran.join(seen, on="job_id", how="left", maintain_order="left").with_columns(
        pl.col("gpus_seen").fill_null(0), pl.when(known).then("peak_bytes").alias("peak_bytes")
    )
    ratio = pl.when(pl.col("capacity_bytes") > 0).then(pl.col("peak_bytes") / pl.col("capacity_bytes"))
    return found.with_columns(used_ratio=ratio).select(
        "job_id", "user", "name", "family", "gpus", "gpus_seen", "state", "gpu_hours", "peak_bytes", "capacity_bytes",
        "used_ratio", smallest_share(pl.col("used_ratio")).alias("share"),
    )  # fmt: skip


def smallest_share(used_ratio: pl.Expr) -> pl.Expr:
    """The smallest of `SHARES` that holds a use with headroom; all where none does, null where unknown."""
    found = pl.when(used_ratio.is_not_null()).then(pl.lit(SHARES[-1]))
    for share in reversed(SHARES[:-1]):
        found = pl.when(used_ratio * (1 + HEADROOM) <= share).then(pl.lit(share)).otherwise(found)
    return found


def memory_by_family(of_jobs: pl.DataFrame) -> pl.DataFrame:
    """Use by user and name family; the family is judged by its hungriest job.

    Args:
        of_jobs: As `memory_of_jobs` gives them; with `estimated_bytes` where models are described.

    Returns:
        `user`, `family`, `jobs`, `judged` (jobs whose peak is known), `gpus` (the most asked for), `gpu_hours` of the
        judged, `peak_bytes`, `capacity_bytes`, `used_ratio`, `share`, `idle_gpu_hours` (GPU-hours × the part of memory
        that no job of the family ever used), the most idle first; `estimated_bytes` of the judged job that needs most,
        where estimates are there. Families of which no job is judged are left out.
    """
    judged = pl.col("used_ratio").is_not_null()
    found = of_jobs.group_by("user", "family").agg(
        pl.len().cast(pl.Int64).alias("jobs"), judged.sum().cast(pl.Int64).alias("judged"), pl.col("gpus").max(),
        pl.col("gpu_hours").filter(judged).sum(), pl.col("peak_bytes").filter(judged).max(),
        pl.col("capacity_bytes").filter(judged).max(), pl.col("used_ratio").max(),
        *(pl.col(name).filter(judged).max() for name in ("estimated_bytes",) if name in of_jobs.columns),
    )  # fmt: skip
    idle = pl.col("gpu_hours") * (1 - pl.col("used_ratio")).clip(0, 1)
    return (
        found.filter(pl.col("judged") > 0)
        .with_columns(smallest_share(pl.col("used_ratio")).alias("share"), idle.alias("idle_gpu_hours"))
        .sort("idle_gpu_hours", "user", "family", descending=[True, False, False])
    )
