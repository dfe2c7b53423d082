"""Jobs that an exporter names in a series of their own, laid on the samples of the GPUs that they speak of.

jobstats gives the id of a GPU's job as a value, Omnistat names the jobs of a node in labels. Which rows these are
stands in `features/exporters/`. Pure functions of frames.
"""

from __future__ import annotations

import polars as pl

from features.exporters.metric import JOB_HERE, JOB_NUMBER

_LARGEST = 2**53  # above, a double is no id


def with_job_facts(gpu: pl.DataFrame, facts: pl.DataFrame) -> pl.DataFrame:
    """Samples of GPUs with the jobs that facts of the same node and time name.

    A job that a sample's own labels name stays. What is said of one GPU goes before what is said of its node. Where
    several jobs are named of one GPU, or of one node, no one knows which has the GPU.

    Args:
        gpu: `node`, `gpu_uuid`, `job_id`, `ts` and quantities.
        facts: `node`, `gpu_uuid` (empty: all GPUs of the node), `job_id`, `ts`; `JOB_NUMBER` an id as value,
            `JOB_HERE` 1 where `job_id` is there.

    Returns:
        `gpu` with `job_id` filled in.
    """
    if gpu.is_empty() or facts.is_empty():
        return gpu
    lacking = [pl.lit(None, dtype=pl.Float64).alias(name) for name in (JOB_NUMBER, JOB_HERE) if name not in facts]
    number = pl.col(JOB_NUMBER)
    is_id = number.is_between(1, _LARGEST) & (number == number.floor())
    told = facts.with_columns(lacking).select(
        "node", "gpu_uuid", "ts",
        pl.when(is_id).then(number).cast(pl.Int64).cast(pl.String)
        .fill_null(pl.when(pl.col(JOB_HERE) > 0).then("job_id")).alias("_job"),
    ).filter(pl.col("_job").is_not_null() & (pl.col("_job") != ""))  # fmt: skip
    given = [pl.col("job_id")]
    for name, key in (("_of_gpu", ["node", "gpu_uuid", "ts"]), ("_of_node", ["node", "ts"])):
        part = told.filter((pl.col("gpu_uuid") != "") == (name == "_of_gpu"))
        if part.is_empty():
            continue
        only = part.group_by(key).agg(pl.col("_job").first().alias(name), pl.col("_job").n_unique().alias("_jobs"))
        gpu = gpu.join(only.filter(pl.col("_jobs") == 1).drop("_jobs"), on=key, how="left", maintain_order="left")
        given.append(pl.col(name))
    return gpu.with_columns(pl.coalesce(given).alias("job_id")).drop("_of_gpu", "_of_node", strict=False)
