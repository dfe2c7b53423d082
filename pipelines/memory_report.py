"""What the memory commands print: the estimate of a training job, and how much of their GPUs' memory jobs used.

No formulas here: `models/memory.py` and `features/memory_use.py` have them; what jobs train by their names says
`models/memory_descriptions.py`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from models.memory_inputs import GIB, Training
from models.memory_parameters import adapter_parameters
from scheduler_hints.memory_estimates import MemoryEstimate, memory_answer

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

    from models.memory_descriptions import Description
    from pipelines.settings import Settings
    from pipelines.store import Reader

_PIECE = timedelta(days=1)
# A sample belongs to the job that held the GPU then; where no interval says so, to the job that its own labels name.
_PEAKS = """
WITH s AS (
    SELECT node, gpu_uuid, ts, job_id, fb_used_bytes, fb_total_bytes FROM core_gpu_samples
    WHERE "cluster" = $cluster AND ts >= $begin AND ts < $end AND fb_used_bytes IS NOT NULL
), j AS (
    SELECT node, gpu_uuid, job_id, start_time, end_time, is_shared FROM core_gpu_jobs
    WHERE "cluster" = $cluster AND start_time < $end AND (end_time IS NULL OR end_time > $begin)
), held AS (
    SELECT s.node, s.gpu_uuid, s.fb_used_bytes, s.fb_total_bytes,
        j.job_id IS NOT NULL AND (j.end_time IS NULL OR s.ts < j.end_time) AS is_held, j.is_shared,
        j.job_id AS holder, s.job_id AS labelled
    FROM s ASOF LEFT JOIN j ON s.node = j.node AND s.gpu_uuid = j.gpu_uuid AND s.ts >= j.start_time
)
SELECT CASE WHEN is_held THEN holder ELSE labelled END AS job_id, node, gpu_uuid,
    max(fb_used_bytes)::DOUBLE AS peak_bytes, max(fb_total_bytes)::DOUBLE AS capacity_bytes, count(*)::BIGINT AS samples
FROM held WHERE NOT (is_held AND coalesce(is_shared, false)) GROUP BY ALL HAVING job_id IS NOT NULL AND job_id <> ''
"""


def print_estimate(training: Training, capacity_bytes: int | None, *, as_json: bool = False) -> bool:
    """Print the device memory of a training job.

    Args:
        training: The job.
        capacity_bytes: Memory of one GPU, bytes; None: not compared.
        as_json: Print JSON, the same as the API's.

    Returns:
        Whether it fits; True where no GPU was given.
    """
    answer = memory_answer(training, capacity_bytes)
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        print("\n".join(estimate_lines(answer, training)))
    return answer.fits is not False


def estimate_lines(answer: MemoryEstimate, training: Training) -> list[str]:
    """The estimate as lines of text."""
    stage = "" if training.pipeline_parallel == 1 else f", pipeline stage {answer.stage + 1} the fullest"
    gpus = "1 GPU" if answer.gpus == 1 else f"{answer.gpus:,} GPUs"
    trained = adapter_parameters(training)
    adapters = f", {trained / 1e6:,.3g} million more trained as adapters," if trained else ""
    out = [f"{answer.parameters / 1e9:.3g} billion parameters{adapters} on {gpus}; one GPU of them{stage}:", ""]
    out += [f"  {line.name:<24} {line.bytes / GIB:>9.2f} GiB   {line.source}" for line in answer.lines]
    out += [f"  {'in all':<24} {answer.total_bytes / GIB:>9.2f} GiB", ""]
    smallest = answer.smallest_gpu_gib
    holds = f"smallest usual GPU that holds it: {smallest} GiB" if smallest else "no GPU that there is holds it"
    if answer.fits is None or answer.gpu_memory_bytes is None or answer.headroom_bytes is None:
        return [*out, holds]
    capacity = f"{answer.gpu_memory_bytes / GIB:.4g} GiB"
    if answer.fits:
        return [*out, f"fits {capacity}, {answer.headroom_bytes / GIB:.2f} GiB to spare; {holds}"]
    out.append(f"does not fit {capacity}: {-answer.headroom_bytes / GIB:.2f} GiB too much; {holds}")
    if not answer.changes:
        return [*out, "nothing that is known here would make it smaller"]
    width = max(len(change.change) for change in answer.changes)
    out.append("what each change would give:")
    for change in answer.changes:
        fate = "fits" if change.fits else "too much still"
        out.append(f"  {change.change:<{width}}  {change.total_bytes / GIB:>9.2f} GiB on {change.gpus:,} GPUs   {fate}")
    if not any(change.fits for change in answer.changes):
        out.append("no combination of them fits: more GPUs, a smaller model or shorter sequences are needed")
    return out


def read_memory_use(reader: Reader, cluster: str, begin: datetime, end: datetime) -> pl.DataFrame:
    """Requested and used device memory of a cluster's jobs, as `features.memory_use.memory_of_jobs` has it.

    GPUs that several jobs share are left out: no one knows whose memory it is.

    Args:
        reader: Store at one snapshot.
        cluster: Name of the cluster.
        begin: UTC, included.
        end: UTC, excluded.
    """
    import polars as pl

    from features.memory_use import PEAKS, memory_of_jobs

    pieces = []
    first = begin
    while first < end:  # a day at a time: what is held does not grow with the span
        last = min(first + _PIECE, end)
        pieces.append(reader.query(_PEAKS, {"cluster": cluster, "begin": first, "end": last}).cast(dict(PEAKS)))
        first = last
    peaks = pl.concat(pieces) if pieces else pl.DataFrame(schema=dict(PEAKS))
    peaks = peaks.group_by("job_id", "node", "gpu_uuid").agg(
        pl.col("peak_bytes").max(), pl.col("capacity_bytes").max(), pl.col("samples").sum()
    )
    jobs = reader.query(
        'SELECT job_id, submit_time, "user", name, gpus, state, start_time, end_time FROM core_jobs '
        'WHERE "cluster" = ? AND start_time < ? AND (end_time > ? OR (end_time IS NULL '
        "AND state IN ('RUNNING', 'SUSPENDED'))) AND gpus > 0",
        [cluster, end, begin],
    )
    return memory_of_jobs(peaks, jobs, begin, end)


def read_descriptions(path: Path) -> tuple[Description, ...]:
    """Descriptions of models from a TOML file.

    Raises:
        CommandError: It cannot be read, or a description is wrong.
    """
    import tomllib

    from models.memory_descriptions import DescriptionError, descriptions_of
    from pipelines.compose import CommandError

    try:
        return descriptions_of(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, DescriptionError) as error:
        raise CommandError(f"{path}: {error}") from None


def print_memory_use(
    settings: Settings, cluster: str | None, now: datetime, since: timedelta, *, top: int, as_json: bool = False,
    models: Path | None = None,
) -> None:  # fmt: skip
    """Print which jobs leave most device memory unused, by user and name family.

    Args:
        settings: All settings.
        cluster: Name of the cluster; None: all.
        now: Present time, UTC.
        since: How far back.
        top: Families at most.
        as_json: Print JSON, all of it.
        models: File of descriptions of what jobs train: estimates are printed beside.

    Raises:
        CommandError: The file of descriptions is wrong.
        SettingsError: There is no such cluster, or none at all.
        StoreError: There is no store yet, or it cannot be read.
    """
    from features.memory_use import memory_by_family
    from models.memory_descriptions import with_estimates
    from pipelines.compose import clusters_of, open_store

    described = None if models is None else read_descriptions(models)
    out = []
    names = clusters_of(settings, cluster)
    with open_store(settings, read_only=True) as store:
        for name in names:
            with store.reader() as reader:
                of_jobs = read_memory_use(reader, name, now - since, now)
            if described is not None:
                of_jobs = with_estimates(of_jobs, described)
            families = memory_by_family(of_jobs)
            if as_json:
                found = {"cluster": name, "jobs": of_jobs.height, "families": families.to_dicts()}
                out.append(found | ({} if described is None else {"estimates": estimate_facts(of_jobs)}))
            else:
                print("\n".join(use_lines(name, of_jobs, families, since, top)))
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(out), indent=2).decode())


def _gib(size: float | None) -> str:
    return "?" if size is None else f"{size / GIB:.1f} GiB"


def estimate_facts(of_jobs: pl.DataFrame) -> dict[str, Any]:
    """How estimates stand to what jobs used and were given, over the jobs of which all three are known.

    Args:
        of_jobs: As `models.memory_descriptions.with_estimates` gives them.
    """
    import polars as pl

    both = of_jobs.filter(pl.col("estimated_bytes").is_not_null() & pl.col("used_ratio").is_not_null())
    ratio = both["estimated_bytes"] / both["peak_bytes"]
    levels = {name: ratio.quantile(level) for name, level in (("q10", 0.1), ("q50", 0.5), ("q90", 0.9))}
    return {
        "described": int(of_jobs["is_described"].sum()),
        "estimated": of_jobs["estimated_bytes"].count(),
        "judged": both.height,
        **{f"estimated_to_used_{name}": value for name, value in levels.items()},
        "estimated_above_requested": int((both["estimated_bytes"] > both["capacity_bytes"]).sum()),
    }


def _estimate_lines(of_jobs: pl.DataFrame) -> list[str]:
    from pipelines.words import counted

    found = estimate_facts(of_jobs)
    if not found["judged"]:
        return [f"  descriptions are of {counted(found['described'], 'job')}; of none is the use known too"]
    lines = [
        f"  {counted(found['described'], 'job')} described, {found['estimated']:,} of them estimated; "
        f"estimated ÷ used, of {counted(found['judged'], 'job')}: median {found['estimated_to_used_q50']:.2f}, "
        f"80 % from {found['estimated_to_used_q10']:.2f} to {found['estimated_to_used_q90']:.2f}"
    ]
    if found["estimated_above_requested"]:
        above = counted(found["estimated_above_requested"], "job")
        lines.append(
            f"  of {above} the estimate is more than their GPUs have, and yet they ran: look at the description"
        )
    return lines


def use_lines(name: str, of_jobs: pl.DataFrame, families: pl.DataFrame, since: timedelta, top: int) -> list[str]:
    """The use of memory as lines of text."""
    from features.memory_use import HEADROOM
    from pipelines.words import counted

    days = since.total_seconds() / 86_400
    length = "a day" if days == 1 else f"{days:.3g} days"
    judged = of_jobs["used_ratio"].count()
    out = [f"{name}: {counted(of_jobs.height, 'job')} with GPUs in {length}, memory of {judged:,} of them known"]
    if not judged:
        why = "their GPUs were not seen, were shared, or report no memory; `weatherglass doctor` checks the sources"
        return [*out, f"  {why}"] if of_jobs.height else out
    over = families.filter(families["share"] <= 0.5)
    out.append(
        f"  half a GPU's memory or less would do for {counted(len(over), 'family', 'families')}, "
        f"{over['gpu_hours'].sum():,.0f} of {families['gpu_hours'].sum():,.0f} GPU-hours"
    )
    has_estimates = "estimated_bytes" in families.columns
    out += _estimate_lines(of_jobs) if has_estimates else []
    out.append(
        f"  {'user':<12} {'jobs like':<24} {'jobs':>6} {'GPUs':>5} {'GPU-h':>9} {'peak':>11} {'of':>11} "
        + (f"{'estimated':>11} " if has_estimates else "")
        + " would do"
    )
    for row in families.head(top).iter_rows(named=True):
        wanted = "all of it"
        if row["share"] < 1:
            wanted = f"1/{round(1 / row['share'])}: {row['share'] * row['capacity_bytes'] / GIB:.0f} GiB"
            wanted += ", as a MIG slice" if row["gpus"] == 1 else " GPUs"
        peak, capacity = (f"{row[column] / GIB:>7.1f} GiB" for column in ("peak_bytes", "capacity_bytes"))
        out.append(
            f"  {(row['user'] or '?')[:12]:<12} {(row['family'] or '?')[:24]:<24} {row['judged']:>6,} "
            f"{row['gpus']:>5,} {row['gpu_hours']:>9,.0f} {peak} {capacity} "
            + (f"{_gib(row['estimated_bytes']):>11} " if has_estimates else "")
            + f" {wanted}"
        )
    if families.height > top:
        out.append(f"  … and {counted(families.height - top, 'more family', 'more families')}; --top shows more")
    out.append(
        f"  Peaks are of readings, with {HEADROOM:.0%} on top. Memory alone: whether the compute of a slice is enough "
        "is not asked; an allocator that takes all memory at once hides what a job needs."
    )
    return out
