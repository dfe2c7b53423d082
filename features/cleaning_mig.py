"""Instances of a GPU in MIG mode, and partitions of AMD's: their rows become one row of the whole GPU.

An exporter repeats what belongs to the board (power, temperature, clocks, errors) on every instance, gives activity of
each instance by itself, and memory of the instances or of the board. Only this aggregation belongs here.
"""

from __future__ import annotations

import polars as pl

from features.cleaning_findings import count
from features.cleaning_rows import merge, unique

_KEY = ("cluster", "node", "gpu_uuid", "ts")
_SUMMED = ("fb_used_bytes", "fb_total_bytes", "fb_reserved_bytes")
_ACTIVITY = ("engine_active_ratio", "sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")
_OF_PARTS = ("gpu_util_ratio", *_SUMMED, *_ACTIVITY)
_SLICES = 7
# Partitions of equal size, whose utilisation is measured, and how many there are; of cpx one a die: 6 or 8.
_COUNTS = {"dpx": 2, "tpx": 3, "qpx": 4, "cpx": 6}
_AMD = tuple(_COUNTS)
# Profiles that only boards of four slices have: A30 (24 GB) and RTX PRO 6000 (96 GB).
_OF_FOUR = r"^(?:\d+c\.)?(?:1g\.6gb|2g\.12gb|4g\.24gb|2g\.48gb|4g\.96gb)"


def merge_instances(samples: pl.DataFrame, findings: list[pl.DataFrame]) -> pl.DataFrame:
    """One row a GPU and time where there were rows of its MIG instances.

    Power, temperatures, clocks, limits, traffic, flags, XID and errors by their maximum. Memory is the whole GPU's own
    where a row of it has it, else the sum over its instances. Activity is the mean over the slices of the GPU, those of
    no instance being idle (1g.10gb is one of seven; of an A30 one of four). Utilisation 0 is not believed. Partitions
    of AMD's GPUs have equal parts, in utilisation too; while one is missing, no one knows what the whole GPU does.

    Args:
        samples: Rows of `raw_gpu_samples`, values bounded already.
        findings: Takes what was wrong.

    Returns:
        The rows without instances; other rows as they were. The columns `mig_instance` and `mig_profile` are gone.
    """
    if samples["mig_instance"].null_count() == len(samples):
        return samples.drop("mig_instance", "mig_profile")
    is_part = pl.col("mig_instance").is_not_null() & (pl.col("mig_instance") != "")
    divided = samples.filter(is_part).select(_KEY).unique()
    others = samples.join(divided, on=_KEY, how="anti").drop("mig_instance", "mig_profile")
    rows = samples.join(divided, on=_KEY, how="semi")
    whole = unique(rows.filter(~is_part.fill_null(False)), _KEY, findings)
    parts = unique(rows.filter(is_part), (*_KEY, "mig_instance"), findings)
    is_whole = pl.len().over(_KEY) >= _expected().max().over(_KEY)
    incomplete = parts.filter(~is_whole).select(_KEY).unique()
    merged = _with_activity(_with_memory(merge(rows.drop("mig_instance", "mig_profile"), _KEY, findings), whole, parts),
                            whole, parts, findings)  # fmt: skip
    merged = _without_incomplete(_with_utilisation(merged, parts, findings), whole, incomplete, findings)
    return pl.concat([others, merged.select(others.columns)])


def _expected() -> pl.Expr:
    """How many partitions the GPU of a row has at least; 0 for MIG instances, of which there may be any number."""
    kind = pl.col("mig_profile").replace_strict(_COUNTS, default=None, return_dtype=pl.Int64)
    number = pl.col("mig_instance").cast(pl.Int64, strict=False) + 1
    return pl.when(kind.is_not_null()).then(pl.max_horizontal(kind, number)).otherwise(0)


def _without_incomplete(
    merged: pl.DataFrame, whole: pl.DataFrame, incomplete: pl.DataFrame, findings: list[pl.DataFrame]
) -> pl.DataFrame:
    """Null for what only all partitions of a GPU tell together, while some are missing."""
    if incomplete.is_empty():
        return merged
    own = whole.select(*_KEY, *(pl.col(name).is_not_null().alias(f"_{name}") for name in _OF_PARTS))
    rows = merged.join(incomplete.with_columns(_gap=True), on=_KEY, how="left", maintain_order="left")
    rows = rows.join(own, on=_KEY, how="left", maintain_order="left")
    for name in _OF_PARTS:
        lost = pl.col("_gap").fill_null(False) & ~pl.col(f"_{name}").fill_null(False) & pl.col(name).is_not_null()
        at = rows.select(lost).to_series()
        if at.any():
            findings.append(count(rows.filter(at), name, "partition_missing"))
            rows = rows.with_columns(pl.when(~at).then(name).alias(name))
    return rows.select(merged.columns)


def _with_memory(merged: pl.DataFrame, whole: pl.DataFrame, parts: pl.DataFrame) -> pl.DataFrame:
    # A sum that lacks an addend is none.
    sums = parts.group_by(_KEY).agg(
        pl.when(pl.col(name).null_count() == 0).then(pl.col(name).sum()).alias(name) for name in _SUMMED
    )
    return _replaced(merged, _SUMMED, whole, sums)


def _with_utilisation(merged: pl.DataFrame, parts: pl.DataFrame, findings: list[pl.DataFrame]) -> pl.DataFrame:
    name = "gpu_util_ratio"
    equal = (
        parts.filter(pl.col("mig_profile").is_in(_AMD))
        .group_by(_KEY)
        .agg(pl.col(name).mean().alias("_mean"), _equal=True)
    )
    rows = merged.join(equal, on=_KEY, how="left", maintain_order="left")
    unmeasured = rows.select(((pl.col(name) == 0) & pl.col("_equal").is_null()).fill_null(False)).to_series()
    if unmeasured.any():
        findings.append(count(rows.filter(unmeasured), name, "zero_on_mig"))
    value = pl.when(~unmeasured).then(pl.coalesce("_mean", name)).alias(name)
    return rows.with_columns(value).drop("_mean", "_equal")


def _with_activity(
    merged: pl.DataFrame, whole: pl.DataFrame, parts: pl.DataFrame, findings: list[pl.DataFrame]
) -> pl.DataFrame:
    profile = pl.col("mig_profile")
    compute, graphics = profile.str.extract(r"^(\d+)c\."), profile.str.extract(r"^(?:\d+c\.)?(\d+)g\b")
    weighted = parts.with_columns(
        pl.when(profile.is_in(_AMD))
        .then(1.0)
        .otherwise(pl.coalesce(compute, graphics).cast(pl.Float64))
        .alias("_slices"),
        pl.when(profile.is_in(_AMD))
        .then(pl.len().over(_KEY))
        .when(profile.str.contains(_OF_FOUR))
        .then(4)
        .otherwise(_SLICES)
        .alias("_of"),
    )
    means = weighted.group_by(_KEY, maintain_order=True).agg(
        pl.when((pl.col(name).null_count() == 0) & (pl.col("_slices").null_count() == 0))
        .then((pl.col(name) * pl.col("_slices")).sum() / pl.col("_of").min())
        .clip(upper_bound=1.0)
        .cast(pl.Float32)
        .alias(name)
        for name in _ACTIVITY
    )
    result = _replaced(merged, _ACTIVITY, means, whole)
    for name in _ACTIVITY:
        lost = merged[name].is_not_null() & result[name].is_null()
        if lost.any():
            findings.append(count(merged.filter(lost), name, "no_profile"))
    return result


def _replaced(merged: pl.DataFrame, names: tuple[str, ...], first: pl.DataFrame, second: pl.DataFrame) -> pl.DataFrame:
    """The merged rows with these columns taken from `first`, where that has none from `second`."""
    rows = merged.drop(names)
    for number, frame in enumerate((first, second)):
        chosen = frame.select(*_KEY, *(pl.col(name).alias(f"{name}{number}") for name in names))
        rows = rows.join(chosen, on=_KEY, how="left", maintain_order="left")
    return rows.with_columns(pl.coalesce(f"{name}0", f"{name}1").alias(name) for name in names).drop(
        [f"{name}{number}" for name in names for number in (0, 1)]
    )
