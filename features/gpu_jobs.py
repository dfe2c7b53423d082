"""Which job held which GPU, and when: intervals from several sources merged into one table.

Evidence is an interval of one source: labels of an exporter's series, the scheduler's GPU indices, pods, samples that
were attributed to a whole-node job. A GPU is known by its UUID, so indices that move at a reboot change nothing. On one
GPU no two rows overlap unless both are shared on purpose. The result does not depend on the order of the evidence.

Pure functions of frames; reading and writing them stands in `pipelines/gpu_jobs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import polars as pl

from features.vocabulary import schema

# Best first: an exporter names the board itself, the scheduler its index, an attribution only the node.
SOURCES = ("exporter", "slurm", "pod", "samples")
COLUMNS = ("node", "gpu_uuid", "gpu_index", "job_id", "start_time", "end_time", "source", "is_shared")
_OPEN = datetime(2200, 1, 1, tzinfo=UTC)
_GPU = ["node", "gpu_uuid"]
_MASKS = {"+".join(s for i, s in enumerate(SOURCES) if mask >> i & 1): mask for mask in range(1, 1 << len(SOURCES))}


def evidence_schema() -> dict[str, pl.DataType | type[pl.DataType]]:
    """Columns of evidence and of merged rows, with their dtypes."""
    types = schema("core_gpu_jobs")
    return {name: types[name] for name in COLUMNS}


def empty_evidence() -> pl.DataFrame:
    """No evidence."""
    return pl.DataFrame(schema=evidence_schema())


def sightings(
    seen: pl.DataFrame, *, gap_s: float, until: datetime | None = None, step_s: float = 0.0, source: str = "exporter"
) -> pl.DataFrame:
    """Intervals over which a job's name was seen on a GPU.

    A name that is away for no longer than `gap_s` was there all the time.

    Args:
        seen: `ts`, `node`, `gpu_uuid`, `gpu_index`, `job_id`, one row a sighting; null jobs are passed over. With
            `last_ts` a row stands for sightings from `ts` to then. With `is_shared` it says who shares; else jobs share
            a GPU when several are seen on it at one `ts`.
        gap_s: Longest absence that does not end an interval, s.
        until: Time up to which was looked; names last seen within `gap_s` of it are open. None: none is open.
        step_s: A sighting holds for this long, s.
        source: One of `SOURCES`.

    Returns:
        Evidence; `end_time` is null where the interval is open.
    """
    seen = seen.filter(pl.col("job_id").is_not_null() & (pl.col("job_id") != ""))
    if "is_shared" not in seen.columns:
        jobs = pl.col("job_id").n_unique().over([*_GPU, "ts"])
        seen = seen.with_columns((jobs > 1).alias("is_shared"))
    last = pl.col("last_ts") if "last_ts" in seen.columns else pl.col("ts")
    spans = seen.with_columns(
        pl.col("ts").alias("start_time"),
        (last + timedelta(seconds=step_s)).alias("end_time"),
        pl.lit(_MASKS[_known(source)], dtype=pl.Int32).alias("source"),
    )
    runs = _coalesced(
        _coded(_cast(spans)).sort(*_GPU, "job_id", "start_time", "gpu_index"),
        [*_GPU, "job_id"],
        timedelta(seconds=gap_s),
    )
    if until is not None:
        is_open = pl.col("end_time") + timedelta(seconds=gap_s) >= until
        runs = runs.with_columns(pl.when(~is_open).then("end_time").alias("end_time"))
    return _named(runs)


def merge(evidence: pl.DataFrame, jobs: pl.DataFrame, *, gap_s: float = 0.0) -> pl.DataFrame:
    """One table out of the evidence of all sources.

    What a source says of a job before its start or after its end is cut off (labels linger). Where two jobs claim a
    GPU at once, those that share it on purpose both have it; else the better source counts, and of equal sources the
    claim that began later.

    Args:
        evidence: Columns of `COLUMNS`, in any order; an end of null is open. `source` may name several, as
            `exporter+slurm`.
        jobs: `job_id`, `start_time`, `end_time` (null: runs) of each attempt; jobs that are not in it are not cut.
        gap_s: Gaps of one job up to this length are closed where no other job was on the GPU meanwhile, s.

    Returns:
        Columns of `COLUMNS`, by node, GPU and start; `source` names all whose evidence is in the row.

    Raises:
        ValueError: A source is unknown; the message names it and the valid ones.
    """
    if evidence.is_empty():
        return empty_evidence()
    for text in evidence["source"].unique().to_list():
        _known(text)
    spans = _cast(
        evidence.with_columns(
            pl.col("source").replace_strict(_MASKS, return_dtype=pl.Int32),
            pl.col("end_time").fill_null(_OPEN),
            pl.col("is_shared").fill_null(False),
        )
    )
    spans = _coded(_within_jobs(spans, jobs))
    spans = spans.sort(*_GPU, "job_id", "source", "start_time", "end_time", "gpu_index", "is_shared")
    spans = _coalesced(spans, [*_GPU, "job_id", "source"], timedelta(seconds=gap_s)).sort(*_GPU, "start_time", "job_id")
    # Only GPUs on which different jobs overlap need the sweep.
    reached = pl.col("end_time").cum_max().shift(1).over(_GPU)
    clash = spans.filter(pl.col("start_time") < reached).select(_GPU).unique()
    rows = [spans.join(clash, on=_GPU, how="anti")]
    contested = spans.join(clash, on=_GPU, how="semi").sort(*_GPU, "start_time", "job_id", "source")
    won = [row for _, claims in contested.group_by(_GPU, maintain_order=True) for row in _winners(claims)]
    rows.append(pl.DataFrame(won, schema=spans.schema, orient="row"))
    merged = pl.concat(rows).sort(*_GPU, "job_id", "start_time", "end_time", "source")
    whole = _coalesced(merged, [*_GPU, "job_id"], timedelta(0)).sort(*_GPU, "start_time", "job_id")
    return _named(_bridged(whole, timedelta(seconds=gap_s))).sort(*_GPU, "start_time", "job_id")


def held_evidence(held: pl.DataFrame, boards: pl.DataFrame, source: str) -> tuple[pl.DataFrame, int]:
    """Evidence from a scheduler's word of this moment: who holds which GPU since when.

    Args:
        held: `node`, `job_id`, `start_time`, `gpu_index` or `gpu_uuid` or both, and `is_shared`.
        boards: `node`, `gpu_index`, `gpu_uuid` as of this moment.
        source: One of `SOURCES`.

    Returns:
        Open evidence, and how many GPUs were left out because no board is known at their index.
    """
    held = held.with_columns(
        pl.lit(None, dtype=dtype).alias(name)
        for name, dtype in (("gpu_uuid", pl.String), ("gpu_index", pl.Int32))
        if name not in held.columns
    )
    boards = boards.select("node", pl.col("gpu_index").cast(pl.Int32), "gpu_uuid").drop_nulls()
    by_index = boards.unique(["node", "gpu_index"], keep="none")  # two boards at one index: no one knows which
    by_uuid = boards.unique(["node", "gpu_uuid"], keep="none")
    found = (
        held.with_columns(pl.col("gpu_index").cast(pl.Int32))
        .join(by_index, on=["node", "gpu_index"], how="left", suffix="_told")
        .join(by_uuid, on=["node", "gpu_uuid"], how="left", suffix="_told")
        .with_columns(
            pl.coalesce("gpu_uuid", "gpu_uuid_told").alias("gpu_uuid"),
            pl.coalesce("gpu_index", "gpu_index_told").alias("gpu_index"),
            pl.lit(None, dtype=schema("core_gpu_jobs")["end_time"]).alias("end_time"),
            pl.lit(_known(source)).alias("source"),
        )
    )
    lost = found["gpu_uuid"].null_count()
    found = found.filter(pl.col("gpu_uuid").is_not_null() & pl.col("start_time").is_not_null())
    return found.select(pl.col(name).cast(dtype) for name, dtype in evidence_schema().items()), lost


def _known(source: str) -> str:
    if source not in _MASKS:
        raise ValueError(
            f"no source {source!r} of GPU-job intervals; sources, alone or joined by +: {', '.join(SOURCES)}"
        )
    return source


def _cast(spans: pl.DataFrame) -> pl.DataFrame:
    types = evidence_schema() | {"source": pl.Int32}
    return spans.select(pl.col(name).cast(dtype) for name, dtype in types.items())


def _coded(spans: pl.DataFrame) -> pl.DataFrame:
    """Names as numbers in the order of the alphabet: sorting and grouping them is far quicker."""
    return spans.with_columns(pl.col(name).cast(pl.Enum(spans[name].unique().sort())) for name in (*_GPU, "job_id"))


def _named(spans: pl.DataFrame) -> pl.DataFrame:
    names = {mask: name for name, mask in _MASKS.items()}
    return spans.with_columns(
        pl.col("source").replace_strict(names, return_dtype=pl.String),
        pl.when(pl.col("end_time") < _OPEN).then("end_time").alias("end_time"),
    ).select(pl.col(name).cast(dtype) for name, dtype in evidence_schema().items())


def _within_jobs(spans: pl.DataFrame, jobs: pl.DataFrame) -> pl.DataFrame:
    """Evidence cut to the attempts of its job, where they are known."""
    attempts = jobs.filter(pl.col("start_time").is_not_null()).select(
        "job_id", pl.col("start_time").alias("_from"), pl.col("end_time").fill_null(_OPEN).alias("_to")
    )
    cut = spans.join(attempts.unique(), on="job_id", how="left").with_columns(
        pl.max_horizontal("start_time", "_from").alias("start_time"),
        pl.min_horizontal("end_time", "_to").alias("end_time"),
    )
    return cut.filter(pl.col("start_time") < pl.col("end_time")).select(spans.columns)


def _coalesced(spans: pl.DataFrame, by: list[str], gap: timedelta) -> pl.DataFrame:
    """Spans of one owner that touch, overlap or lie within `gap` become one; sorted by owner and start already."""
    if spans.is_empty():
        return spans
    names = spans.columns
    owner = pl.any_horizontal(pl.col(name) != pl.col(name).shift(1) for name in by).fill_null(True).cum_sum()
    spans = spans.with_columns(owner.alias("_owner"))
    reached = pl.col("end_time").cum_max().shift(1).over("_owner")
    begins = (pl.col("start_time") > reached + gap).fill_null(True)
    return _joined(spans.with_columns(begins.cum_sum().alias("_run")), by).select(names)


def _joined(spans: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Spans of one `_run` as one; runs of `by` follow each other."""
    return spans.group_by("_run", maintain_order=True).agg(
        *(pl.col(name).first() for name in by),
        pl.col("gpu_index").drop_nulls().last(),
        pl.col("start_time").min(),
        pl.col("end_time").max(),
        *([] if "source" in by else [pl.col("source").bitwise_or()]),
        pl.col("is_shared").any(),
    )


def _bridged(spans: pl.DataFrame, gap: timedelta) -> pl.DataFrame:
    """Short gaps between two spans of one job, where nothing else was on the GPU; sorted by GPU and start already."""
    before = pl.col("end_time").shift(1).over(_GPU)
    reached = pl.col("end_time").cum_max().shift(1).over(_GPU)
    same = (pl.col("job_id") == pl.col("job_id").shift(1).over(_GPU)) & (before == reached)
    joined = (same & (pl.col("start_time") <= before + gap)).fill_null(False)
    runs = spans.with_columns((~joined).cum_sum().alias("_run"))
    return _joined(runs, [*_GPU, "job_id"]).select(spans.columns)


def _winners(claims: pl.DataFrame) -> Iterator[tuple]:
    """Who has one GPU between any two moments at which a claim begins or ends."""
    rows = claims.rows()
    moments = sorted({row[4] for row in rows} | {row[5] for row in rows})
    for begin, end in pairwise(moments):
        there = [row for row in rows if row[4] <= begin and row[5] >= end]
        if not there:
            continue
        best = min(there, key=lambda row: (_rank(row[6]), -row[4].timestamp(), row[3]))
        shared = [row for row in there if row[7]] if best[7] else [best]
        for row in shared:
            yield (*row[:4], begin, end, *row[6:])


def _rank(mask: int) -> int:
    return (mask & -mask).bit_length()
