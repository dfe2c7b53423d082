"""What part of their steps jobs spend on communication, how far the slowest rank is behind, which links are hot.

Here belong these figures over a span of time; whether a link is full or a rank a straggler at one moment is said by
`features/labels.py`. Where applications report the part of a step that waited for others, that is the share. Where
none does, the links give a lower bound: the time that what went over a link needs at the rate it can reach.
"""

from __future__ import annotations

import polars as pl

from features.straggler import MIN_GANG
from features.thresholds import ThresholdBook

HIGH_RATIO = 0.30  # from this share of its steps on, a job's communication is worth a look
HOT_RATIO = 0.90  # of what a link can carry
WORKING = 0.05  # activity under which a GPU waits for data, a checkpoint or its start
REPORTED, LINKS = "reported", "links"

JOB_SCHEMA: dict[str, type[pl.DataType] | pl.DataType] = {
    "job_id": pl.String, "gpus": pl.UInt32, "nodes": pl.UInt32, "communication_ratio": pl.Float64, "basis": pl.String,
    "nvlink_ratio": pl.Float64, "port_ratio": pl.Float64, "gang_skew_ratio": pl.Float64, "slowest_rank": pl.Int64,
    "is_high": pl.Boolean,
}  # fmt: skip
LINK_SCHEMA: dict[str, type[pl.DataType] | pl.DataType] = {
    "kind": pl.String, "node": pl.String, "link": pl.String, "load_p95_ratio": pl.Float64,
    "load_mean_ratio": pl.Float64, "hot_ratio": pl.Float64, "samples": pl.UInt32,
}  # fmt: skip


def job_communication(
    samples: pl.DataFrame, ports: pl.DataFrame, progress: pl.DataFrame, book: ThresholdBook
) -> pl.DataFrame:
    """Communication and skew of every job that was seen.

    Args:
        samples: Rows of `core_gpu_samples`, `job_id` among them; quantities may be absent.
        ports: Rows of `core_port_samples`; rates may be absent.
        progress: Rows of `core_job_progress`.
        book: Limits of the nodes.

    Returns:
        A row per job, the highest share first: `communication_ratio`, share of a step (0–1, median of reports; from
        links, a lower bound, the larger of the two that follow), null where nothing tells it; `basis`: `reported` or
        `links`; `nvlink_ratio` and `port_ratio`, time that the traffic needs at the achievable rate ÷ time, mean over
        working GPUs and over the job's ports; `gang_skew_ratio`, own work of the slowest rank ÷ the gang's
        median (1: nobody lags), and that rank; `is_high`: from `HIGH_RATIO` on. Schema `JOB_SCHEMA`.
    """
    gpu = _gpu_loads(samples, book).filter(pl.col("job_id").is_not_null())
    working = gpu.filter(pl.col("activity").is_null() | (pl.col("activity") >= WORKING))
    jobs = (
        gpu.group_by("job_id")
        .agg(pl.col("gpu_uuid").n_unique().alias("gpus"), pl.col("node").n_unique().alias("nodes"))
        .join(working.group_by("job_id").agg(pl.col("load").mean().alias("nvlink_ratio")), "job_id", "left")
        .join(_port_ratio(gpu, ports), "job_id", "left")
        .join(_reported(progress), "job_id", "full", coalesce=True)
        .join(_skew(progress), "job_id", "full", coalesce=True)
    )
    links = pl.max_horizontal("nvlink_ratio", "port_ratio").clip(0, 1)
    jobs = jobs.with_columns(
        communication_ratio=pl.coalesce("reported", links),
        basis=pl.when(pl.col("reported").is_not_null())
        .then(pl.lit(REPORTED))
        .when(links.is_not_null())
        .then(pl.lit(LINKS)),
    ).with_columns(is_high=pl.col("communication_ratio") >= HIGH_RATIO)
    order = ("communication_ratio", "job_id")
    return jobs.select(pl.col(name).cast(kind) for name, kind in JOB_SCHEMA.items()).sort(
        order, descending=[True, False], nulls_last=True
    )


def hot_links(samples: pl.DataFrame, ports: pl.DataFrame, book: ThresholdBook) -> pl.DataFrame:
    """How loaded each GPU's NVLinks and each network port were.

    Args:
        samples: As of `job_communication`.
        ports: As of `job_communication`.
        book: Limits of the nodes.

    Returns:
        A row per link, the fullest first: `kind` (`nvlink`, `port`), `node`, `link` (GPU or device/port), 95th
        percentile and mean of the load ÷ what it can carry, `hot_ratio`: share of samples from `HOT_RATIO` on, and how
        many samples there were. Links without a known rate are left out. Schema `LINK_SCHEMA`.
    """
    gpu = _gpu_loads(samples, book).select(pl.lit("nvlink").alias("kind"), "node", link="gpu_uuid", load="load")
    port = _port_loads(ports).select(pl.lit("port").alias("kind"), "node", "link", "load")
    load = pl.col("load")
    return (
        pl.concat([gpu, port])
        .drop_nulls("load")
        .group_by("kind", "node", "link")
        .agg(
            load.quantile(0.95, "linear").alias("load_p95_ratio"),
            load.mean().alias("load_mean_ratio"),
            (load >= HOT_RATIO).mean().alias("hot_ratio"),
            pl.len().alias("samples"),
        )
        .select(pl.col(name).cast(kind) for name, kind in LINK_SCHEMA.items())
        .sort("load_p95_ratio", "node", "link", descending=[True, False, False])
    )


def _fullest(frame: pl.DataFrame, names: tuple[str, ...]) -> pl.Expr:
    there = [pl.col(name).cast(pl.Float64) for name in names if name in frame.columns]
    return pl.max_horizontal(there) if there else pl.lit(None, dtype=pl.Float64)


def _gpu_loads(samples: pl.DataFrame, book: ThresholdBook) -> pl.DataFrame:
    """`node`, `gpu_uuid`, `job_id`, `activity` and `load` of the NVLinks of each sample."""
    nodes = samples["node"].unique().drop_nulls().sort()
    rate = book.arrays(nodes.to_list())["nvlink_one_way_bytes_per_s"]
    limits = pl.DataFrame({"node": nodes, "rate": pl.Series(rate, dtype=pl.Float64).fill_nan(None)})
    activity = [
        pl.col(name) for name in ("engine_active_ratio", "gpu_util_ratio", "sm_active_ratio") if name in samples.columns
    ]
    job = pl.col("job_id") if "job_id" in samples.columns else pl.lit(None, pl.String).alias("job_id")
    return samples.join(limits, "node", "left").select(
        "node", "gpu_uuid", job,
        (pl.coalesce(activity) if activity else pl.lit(None, pl.Float64)).alias("activity"),
        (_fullest(samples, ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")) / pl.col("rate")).alias("load"),
    )  # fmt: skip


def _port_loads(ports: pl.DataFrame) -> pl.DataFrame:
    """`ts`, `node`, `link` and `load` of each sample of a port."""
    keys = [pl.col(name).fill_null("") for name in ("device", "port") if name in ports.columns]
    speed = pl.lit(None, dtype=pl.Float64)
    if "speed_bytes_per_s" in ports.columns:
        speed = pl.when(pl.col("speed_bytes_per_s") > 0).then(pl.col("speed_bytes_per_s").cast(pl.Float64))
    return ports.drop_nulls(["ts", "node"]).select(
        "ts", "node", (pl.concat_str(keys, separator="/") if keys else pl.lit("")).alias("link"),
        (_fullest(ports, ("tx_bytes_per_s", "rx_bytes_per_s")) / speed).alias("load"),
    )  # fmt: skip


def _port_ratio(gpu: pl.DataFrame, ports: pl.DataFrame) -> pl.DataFrame:
    """Mean load of the ports of each job's nodes; a node that several jobs share says nothing of any of them."""
    owner = gpu.group_by("node").agg(pl.col("job_id").unique()).filter(pl.col("job_id").list.len() == 1)
    of_node = owner.select("node", pl.col("job_id").list.first())
    loads = _port_loads(ports).drop_nulls("load")
    return loads.join(of_node, "node").group_by("job_id").agg(pl.col("load").mean().alias("port_ratio"))


def _reports(progress: pl.DataFrame) -> pl.DataFrame:
    needed = {"job_id", "step_time_s", "communication_time_s"}
    if not needed <= set(progress.columns):
        none = {"job_id": pl.String, "step_time_s": pl.Float64, "communication_time_s": pl.Float64}
        return pl.DataFrame(schema=none | {"rank": pl.Int64, "ts": pl.Datetime("us", "UTC")})
    return progress.filter((pl.col("step_time_s") > 0) & (pl.col("communication_time_s") <= pl.col("step_time_s")))


def _reported(progress: pl.DataFrame) -> pl.DataFrame:
    share = pl.col("communication_time_s") / pl.col("step_time_s")
    return _reports(progress).group_by("job_id").agg(share.cast(pl.Float64).median().alias("reported"))


def _skew(progress: pl.DataFrame) -> pl.DataFrame:
    """Own work of the slowest rank ÷ median of its gang, both medians over time."""
    own = (
        _reports(progress)
        .drop_nulls("rank")
        .group_by("job_id", "rank")
        .agg((pl.col("step_time_s") - pl.col("communication_time_s")).cast(pl.Float64).median().alias("own_s"))
        .sort("job_id", "rank")
    )
    middle = pl.col("own_s").median()
    return (
        own.group_by("job_id")
        .agg(
            pl.when((pl.len() >= MIN_GANG) & (middle > 0))
            .then(pl.col("own_s").max() / middle)
            .alias("gang_skew_ratio"),
            pl.col("rank").get(pl.col("own_s").arg_max()).alias("slowest_rank"),
        )
        .filter(pl.col("gang_skew_ratio").is_not_null())
    )
