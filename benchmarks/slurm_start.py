"""Slurm's own planned starts (`squeue --start`), scored on a real Slurm beside the wait forecaster.

`python -m benchmarks.slurm_start [--jobs N] [--seed N …] [--minutes M] [--speed X] [--keep FOLDER]`. A real slurmctld,
slurmd and slurmdbd, whose clock runs X times as fast, are given a busy piece of a recorded trace for M minutes, one
piece for each seed; the Slurm source reads the queue all the while. Each job is looked at when it is first seen pending
and after 1, 10 and 60 minutes of waiting, by the fast clock. Planned starts hold for the jobs that have one; how many
they are is printed, and every other forecast is scored on those jobs and on all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.fast_slurm import SCHEDULER, Replayed, fast_slurm, piece, replay
from benchmarks.slurm_looks import NAMES, OWN, churn_looks, joined_history, looks_of, started, with_points
from features.jobs import microseconds
from models.outcomes import FIRST, LANDMARKS_S
from models.promotion import mean_interval, ratio_interval
from models.runtime_choice import day_blocks
from models.start_plans import PLAN, start_losses
from models.wait_points import CHURN_STEP_S, start_churn

TRACE = "kth-sp2-1996"
METRICS = {"log1p": 3, "within_60s": 3, "mae_s": 0, "late": 3, "early": 3}  # name → digits
_SUBMIT_SHARE = 0.8  # of the time; the rest lets waiting jobs start
_START_UP_MIN = 0.9


def main() -> None:
    here = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=600, help="of a piece at most")
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="each draws a piece")
    parser.add_argument("--minutes", type=float, default=12.0, help="real minutes of a piece at most")
    parser.add_argument("--speed", type=float, default=400.0, help="of Slurm's clock")
    parser.add_argument("--folder", default=os.environ.get("WEATHERGLASS_TRACES") or here.parent / "shared" / "traces")
    parser.add_argument("--keep", help="folder that replays are kept in, and read from where they are there")
    asked = parser.parse_args()
    trace = pl.read_parquet(Path(asked.folder) / "jobs" / f"{TRACE}.parquet").sort("submit_time", "job_id")
    print(f"clock × {asked.speed:g}; SchedulerParameters={SCHEDULER}")
    looks, moves, starts = [], [], set()
    for seed in asked.seed:
        hours = (asked.minutes - _START_UP_MIN) / 60 * asked.speed
        start = busy_start(trace, hours * _SUBMIT_SHARE, seed)
        if start in starts:
            print(f"\nseed {seed} draws a piece that another one drew: left out")
            continue
        starts.add(start)
        jobs = piece(trace, start, hours * _SUBMIT_SHARE, asked.jobs)
        folder = Path(asked.keep) / str(seed) if asked.keep else None
        played = kept(folder) or played_anew(jobs, start, hours, asked.speed, folder)
        history = joined_history(trace, played, jobs, start)
        parts = [looks_of(played, jobs), churn_looks(played, jobs)]
        print(f"\n{TRACE} from {start:%Y-%m-%d %H:%M}: {words_of(played, jobs, parts[0])}", flush=True)
        both = pl.concat(parts, how="diagonal_relaxed")
        points = with_points(both, played, history, start, seed)
        found = [points.head(parts[0].height), points.tail(parts[1].height)]
        looks.append(found[0].with_columns(piece=pl.lit(seed)))
        # Each piece numbers its jobs anew.
        moves.append(found[1].with_columns(pl.concat_str(pl.lit(f"{seed}-"), "job_id").alias("job_id")))
    print_scores(pl.concat(looks))
    print_churn(pl.concat(moves))


def kept(folder: Path | None) -> Replayed | None:
    """A replay from an earlier run, None where there is none."""
    if folder is None or not (folder / "looks.parquet").exists():
        return None
    jobs, states, looks = (pl.read_parquet(folder / f"{name}.parquet") for name in ("jobs", "states", "looks"))
    return Replayed(jobs, states, looks["at"].to_list(), looks["at"][-1])


def played_anew(jobs: pl.DataFrame, start: datetime, hours: float, speed: float, keep: Path | None) -> Replayed:
    """Replay a piece, and keep what came of it where a folder is given."""
    folder = Path(tempfile.mkdtemp(prefix="wg-slurm-"))  # sockets want a short path
    try:
        with fast_slurm(folder, start, speed) as (slurm, clock):
            played = replay(slurm, clock, jobs, start + timedelta(hours=hours))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        looks = pl.DataFrame({"at": played.looks})
        for name, frame in (("jobs", played.jobs), ("states", played.states), ("looks", looks)):
            frame.write_parquet(keep / f"{name}.parquet")
    return played


def busy_start(trace: pl.DataFrame, hours: float, seed: int) -> datetime:
    """A midnight in the last 30 % of the trace, drawn from the quarter whose next `hours` bring the most work."""
    until = timedelta(hours=hours)
    first, last = trace["submit_time"][int(0.7 * trace.height)], trace["submit_time"][-1]
    midnights = pl.datetime_range(first, last - until, "1d", time_zone="UTC", eager=True).dt.truncate("1d").to_list()
    work = pl.col("cpus") * (pl.col("end_time") - pl.col("start_time")).dt.total_seconds()
    submit = pl.col("submit_time")
    brought = [trace.filter((submit >= day) & (submit < day + until)).select(work.sum()).item() for day in midnights]
    busiest = np.sort(np.argsort(brought)[-max(1, len(midnights) // 4) :])
    return midnights[int(np.random.default_rng(seed).choice(busiest))]


def words_of(played: Replayed, jobs: pl.DataFrame, looks: pl.DataFrame) -> str:
    """What was replayed, and what the replay adds to it, in words."""
    asked = played.jobs.join(jobs.select("trace_id", "is_warm", "run_s", "at"), on="trace_id")
    own, begun = asked.filter(~pl.col("is_warm")), started(played, jobs)
    ended = asked.filter((pl.col("state") == "COMPLETED") & pl.col("end_time").is_not_null())
    extra_s = (ended["end_time"] - ended["start_time"]).dt.total_seconds() - ended["run_s"]
    wait_s = (begun["start_time"] - begun["submit_time"]).dt.total_seconds()
    late_s = wait_s.filter(wait_s > 60).median()
    seen, steps_s = looks.filter(landmark_s=FIRST).height, pl.Series(played.looks).diff().dt.total_seconds()
    hours = (played.until - played.looks[0]).total_seconds() / 3600
    slip_s = (own["submit_time"] - own["at"]).dt.total_seconds()
    return "; ".join([
        f"{own.height} jobs, {asked.height - own.height} more filled the machine at the start",
        f"{begun.height} started in {hours:.0f} h, {own.height - begun.height} waited at the end and are not judged",
        f"{(wait_s > 60).mean():.0%} waited over a minute, {late_s or 0:,.0f} s in the middle",
        f"{seen} were seen pending, {begun.height - seen} had started before a poll",
        f"by the fast clock a poll came every {steps_s.median():.0f} s, runs were longer by {extra_s.median():.0f} s "
        f"and submissions later by {slip_s.median():.0f} s than recorded",
    ])  # fmt: skip


def print_scores(looks: pl.DataFrame) -> None:
    """Means of the losses at each landmark: on the jobs that have a planned start, and on all."""
    submit = np.array([microseconds(at) for at in looks["submit_time"]])
    blocks = day_blocks(looks.select(pl.struct("piece", "user").hash(1)).to_series().to_numpy(), submit)
    is_planned = looks[PLAN].is_not_nan().to_numpy()
    shown = "  ".join(f"{name:>10}" for name in METRICS)
    print(f"\n{'':34}{shown}  median of forecast − true, s; 95 % interval of log1p by user × day")
    for landmark in (FIRST, *LANDMARKS_S):
        here = (looks["landmark_s"] == landmark).to_numpy()
        if not here.any():
            continue
        when = f"after {landmark} s of waiting" if landmark else "at first sight"
        print(f"{when}: {here.sum()} looks, {is_planned[here].mean():.3f} of them have a planned start")
        parts = {"planned": here & is_planned} | ({} if is_planned[here].all() else {"all": here})
        for part, rows in parts.items():
            for name in NAMES:
                if rows.any() and not (name == PLAN and part == "all"):
                    print(f"  {part:8}{name:24}{_line(looks.filter(pl.Series(rows)), name, blocks[rows])}")
        if parts["planned"].any():
            both = looks.filter(pl.Series(parts["planned"]))
            own, plan = (
                start_losses(both[name].to_numpy(), both["actual_s"].to_numpy())["log1p"] for name in (OWN, PLAN)
            )
            print(f"  log1p of {OWN} ÷ that of {PLAN}: {ratio_interval(own, plan, blocks[parts['planned']])}")
    actual = looks["actual_s"]
    inside = ((actual >= looks["q10_s"] - 0.5) & (actual <= looks["q90_s"] + 0.5)).mean()
    print(f"{OWN}: {inside:.3f} of {looks.height} starts in its 10–90 % interval")


def _line(looks: pl.DataFrame, name: str, blocks: NDArray[np.uint64]) -> str:
    point, actual = looks[name].to_numpy(), looks["actual_s"].to_numpy()
    losses = start_losses(point, actual)
    if name == OWN:  # within a minute is asked of the point that is made for it
        losses["within_60s"] = start_losses(looks["likeliest_s"].to_numpy(), actual)["within_60s"]
    figures = "  ".join(f"{np.nanmean(losses[metric]):10,.{digits}f}" for metric, digits in METRICS.items())
    spread = mean_interval(losses["log1p"], blocks)
    ends = "" if spread.low is None or spread.high is None else f"  [{spread.low:.2f}, {spread.high:.2f}]"
    return f"{figures}  {np.nanmedian(point - actual):+10,.0f}{ends}"


def print_churn(looks: pl.DataFrame) -> None:
    """How far forecast starts move between looks every ten minutes at the jobs that wait."""
    is_planned = looks[PLAN].is_not_nan()
    planned = looks.filter(is_planned)
    print(f"\nchurn, looks every {CHURN_STEP_S // 60} min; {is_planned.mean():.3f} of them have a planned start")
    for name, frame, words in ((PLAN, planned, ""), (OWN, planned, ", the same looks"), (OWN, looks, ", all looks")):
        columns = {"forecast": pl.lit("wait"), "generated_at": pl.col("at"), "q50_s": pl.col(name)}
        moved = start_churn(frame.with_columns(**columns))
        if moved.height:
            print(
                f"  {name + words:26} {moved.height} jobs, median move {moved['move_s'].median():.0f} s, over ten "
                f"minutes {moved['moved_share'].mean():.3f}, drift {moved['drift_s'].median():+.0f} s"
            )


if __name__ == "__main__":
    main()
