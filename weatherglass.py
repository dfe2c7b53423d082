"""The command line of Weatherglass. Small: each command reads the settings and hands over to the module that does it.

Nothing heavy is imported before a command runs. Exit codes: 0 done; 1 it could not be done (the message says why and
what to do); 2 wrong usage or a wrong setting; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from features.classes import HINT_CLASSES

VERSION = "0.1.0"
TASKS = (
    "runtime",
    "wait",
    "job_failure",
    "node_failure",
    "bottleneck",
    "level",
)  # here too, so that `--help` stays quick


JOB_BACKTESTS = ("runtime", "remaining", "wait", "failure")
BACKTESTS = (*JOB_BACKTESTS, "bottleneck", "level", "faults", "idle")
IMPORTS = ("sacct", "swf", "exposition", "prometheus-json", "jobs", "telemetry")


class _Group(click.Group):
    """A group whose commands are listed in the order of a first day with the program, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("weatherglass: interrupted", err=True)
            ctx.exit(130)


class _Number(click.FloatRange):
    """A number within bounds; NaN, which no bound stops, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is no number", param, ctx)
        return number


class _Length(click.ParamType):
    """A length of time as `90m`, `6h` or `30d`."""

    name = "length of time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        from pipelines.commands import CommandError, duration

        if isinstance(value, timedelta):
            return value
        try:
            return duration(value)
        except CommandError as error:
            self.fail(str(error), param, ctx)


class _Moment(click.ParamType):
    """A moment as `2026-11-30T12:00:00Z` or seconds since 1970."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            moment = datetime.fromtimestamp(float(value), UTC) if _is_number(value) else datetime.fromisoformat(value)
        except (ValueError, OverflowError, OSError):
            self.fail(f"{value!r} is no time; write it as 2026-11-30T12:00:00Z or as seconds since 1970", param, ctx)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


class _Zone(click.ParamType):
    """The name of a time zone."""

    name = "zone"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from zoneinfo import ZoneInfo

        try:
            return ZoneInfo(value).key
        except (ValueError, OSError, KeyError):
            self.fail(f"{value!r} is no time zone; write it as Europe/Berlin", param, ctx)


def _example(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_example("weatherglass run", "WEATHERGLASS_CONFIG=prod.toml weatherglass doctor"),
)
@click.version_option(VERSION, prog_name="weatherglass")
@click.option(
    "--config",
    type=click.Path(dir_okay=False),
    help="Settings file (default: $WEATHERGLASS_CONFIG, weatherglass.toml).",
)
@click.pass_context
def cli(ctx: click.Context, config: str | None) -> None:
    """Predictive telemetry and capacity analytics for GPU training clusters."""
    if config:
        os.environ["WEATHERGLASS_CONFIG"] = config
    ctx.ensure_object(dict)


def _settings(*, with_files: bool = False) -> Any:
    import logging

    from pipelines.settings import load_settings

    settings = load_settings(with_files=with_files)
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # its retries end in an error of ours
    return settings


_cluster = click.option(
    "--cluster", help="Name of the cluster (default: every one; where one is needed, the only one)."
)


@cli.command(epilog=_example("weatherglass run", "WEATHERGLASS_CONFIG=prod.toml weatherglass run"))
@click.option("--no-dagster", is_flag=True, help="Leave Dagster out: no scheduled runs.")
def run(no_dagster: bool) -> None:
    """Start everything under one supervisor.

    Nowcast, hints API and dashboards come first, Dagster behind them.

    Without a settings file it simulates a cluster with history, so that there is something to see.
    """
    from pipelines.supervisor import run_everything

    raise SystemExit(run_everything(dagster=not no_dagster))


@cli.command(epilog=_example("weatherglass doctor"))
def doctor() -> None:
    """Check sources, store, clocks and disk.

    Each check that fails says what to do.
    """
    from pipelines.doctor import examine

    failed = examine(_settings())
    raise SystemExit(1 if failed else 0)


@cli.command(epilog=_example("weatherglass ingest", "weatherglass ingest --cluster prod --since 6h"))
@_cluster
@click.option(
    "--since",
    type=_Length(),
    metavar="TIME",
    help="Read back from this long ago, as 90m, 6h or 30d, whatever was read before.",
)
def ingest(cluster: str | None, since: timedelta | None) -> None:
    """Read new samples and jobs into the store."""
    from pipelines.commands import ingest_once

    try:
        ingest_once(_settings(), cluster, since)
    except KeyboardInterrupt:
        click.echo("weatherglass: interrupted; what was read is in the store, the same command goes on there", err=True)
        raise SystemExit(130) from None


@cli.command(
    "import",
    epilog=_example(
        "weatherglass import sacct jobs.txt --cluster prod",
        "weatherglass import exposition scrapes/ --cluster prod --out samples.parquet",
    ),
)
@click.argument("kind", type=click.Choice(IMPORTS), metavar="KIND")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--cluster", required=True, help="Name of the cluster that the rows are of.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write this Parquet file instead of the store; wants no settings.",
)
@click.option("--at", type=_Moment(), metavar="TIME", help="Time of scrapes whose names and lines tell none.")
@click.option("--tz", "zone", type=_Zone(), default="UTC", show_default=True, help="Of times written without a zone.")
@click.option("--node", default="", help="Node of exporter pages whose labels do not name it.")
def import_command(
    kind: str, path: Path, cluster: str, out: Path | None, at: datetime | None, zone: str, node: str
) -> None:
    """Import files and say what they are worth.

    KIND is one of sacct, swf, exposition, prometheus-json, jobs, telemetry. PATH is a file; of exposition and
    prometheus-json it may be a folder of them. Exit code 1 when nothing could be used.
    """
    from pipelines.imports.command import import_from

    raise SystemExit(0 if import_from(kind, path, cluster, out, _settings, at=at, zone=zone, node=node) else 1)


@cli.command(epilog=_example("weatherglass quality", "weatherglass quality --cluster prod --since 7d"))
@_cluster
@click.option("--since", type=_Length(), metavar="TIME", help="Findings of this long, as 90m, 6h or 30d (default: 1d).")
def quality(cluster: str | None, since: timedelta | None) -> None:
    """Say which values were not believed, and why.

    How many of how many, in which column, when first and last, with an example of each.
    """
    from pipelines.quality import print_quality

    print_quality(_settings(), cluster, since)


@cli.command("demo-history", hidden=True, epilog=_example("weatherglass demo-history"))
def demo_history() -> None:
    """Load the simulator's past into the store (part of `run` without settings)."""
    from pipelines.commands import load_demo_history

    load_demo_history(_settings())


@cli.command(epilog=_example("weatherglass publish"))
@_cluster
def publish(cluster: str | None) -> None:
    """Forecast all jobs and nodes, and publish."""
    from pipelines.commands import publish_once

    publish_once(_settings(), cluster)


@cli.command(epilog=_example("weatherglass idle", "weatherglass idle --cluster prod --gpus 64 --json"))
@_cluster
@click.option("--gpus", type=click.IntRange(1), default=8, show_default=True, help="How many are asked about.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def idle(cluster: str | None, gpus: int, as_json: bool) -> None:
    """Show how many GPUs stay idle for the next hour.

    And for the next 30 minutes. Learns from the jobs of the last two weeks each time; 8 GPUs have a cut-off from which
    they may be offered.
    """
    from datetime import UTC, datetime

    from pipelines.idle import print_idle

    print_idle(_settings(), cluster, gpus, datetime.now(UTC), as_json=as_json)


@cli.command(epilog=_example("weatherglass demand", "weatherglass demand --cluster prod"))
@_cluster
def demand(cluster: str | None) -> None:
    """Show how many jobs and GPUs will be asked for.

    By queue, an hour to two weeks ahead, with the hours in which inference queues leave GPUs free.
    """
    from pipelines.demand import print_demand

    print_demand(_settings(), cluster)


@cli.command(epilog=_example("weatherglass retrain", "weatherglass retrain --cluster prod --task runtime"))
@_cluster
@click.option("--task", "tasks", type=click.Choice(TASKS), multiple=True, help="Only this task (repeatable).")
def retrain(cluster: str | None, tasks: tuple[str, ...]) -> None:
    """Train models; promote what earned it."""
    from pipelines.commands import retrain_once

    retrain_once(_settings(), cluster, tasks)


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@cli.command(
    epilog=_example(
        "weatherglass backtest runtime --jobs jobs.parquet --out runtime-report",
        "weatherglass backtest bottleneck --telemetry gpus.parquet --class thermal_throttle --out report",
        "weatherglass backtest bottleneck --telemetry nodes.parquet --class host_memory --out report",
        "weatherglass backtest bottleneck --telemetry ports.parquet --class fabric_congestion --out report",
        "weatherglass backtest bottleneck --occupancy queues.parquet --class shortage --out report",
        "weatherglass backtest bottleneck --timeline steps.parquet --class straggler --out report",
        "weatherglass backtest level --telemetry gpus.parquet --quantity gpu_power_w --out report",
        "weatherglass backtest faults --faults faults.parquet --nodes 400 --out report",
        "weatherglass backtest idle --occupancy queues.parquet --out report",
    )
)
@click.argument("kind", metavar="KIND", type=click.Choice(BACKTESTS))
@click.option("--jobs", type=_FILE, help="Jobs file, of runtime, remaining, wait and failure.")
@click.option(
    "--telemetry", type=_FILE, help="Samples of GPUs, of level and bottleneck; of nodes or ports: their classes."
)
@click.option("--occupancy", type=_FILE, help="Running, pending and idle GPUs of queues, of shortage and idle.")
@click.option("--timeline", type=_FILE, help="Operations of a job's ranks, of straggler where there is no telemetry.")
@click.option("--faults", type=_FILE, help="Faults of nodes, of faults.")
@click.option(
    "--class",
    "bottleneck_class",
    metavar="CLASS",
    help=f"{', '.join(HINT_CLASSES[:-1])} or {HINT_CLASSES[-1]}.",
)
@click.option("--quantity", metavar="COLUMN", help="Column of the telemetry, of level, as gpu_power_w.")
@click.option("--horizons", metavar="SECONDS", help="Of level (default: 30,60,120) and shortage (default: 120,300).")
@click.option("--gpu-model", help="Whose limits hold, of GPU classes, as 'NVIDIA H100 80GB HBM3'.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes there are, of faults (default: those with a fault).")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder of the outcome.")
@click.option(
    "--seed", type=click.IntRange(0, 2**31), default=1, show_default=True, help="Seed of every random choice."
)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of a fit.")
@click.option(
    "--refit-days",
    type=_Number(0.1, 3_650),
    help="Days between fits (default: 7; of idle 1; of shortage one fit before the test).",
)
def backtest(
    kind: str,
    jobs: Path | None,
    telemetry: Path | None,
    occupancy: Path | None,
    timeline: Path | None,
    faults: Path | None,
    bottleneck_class: str | None,
    quantity: str | None,
    horizons: str | None,
    gpu_model: str | None,
    nodes: int | None,
    out: Path,
    seed: int,
    threads: int,
    refit_days: float | None,
) -> None:
    """Backtest forecasts on recorded files.

    KIND is one of runtime, remaining, wait, failure (jobs), bottleneck, level, faults, idle; no settings are needed.
    Learns on the first 70 % of time and judges on the rest; jobs, faults and idle walk forward, fitting on outcomes
    known by then.
    Writes predictions.parquet, report.json and report.html, and prints every figure beside those of the baselines.
    """
    files = {"telemetry": telemetry, "occupancy": occupancy, "timeline": timeline, "faults": faults}
    options = {"class": bottleneck_class, "quantity": quantity, "horizons": horizons, "gpu-model": gpu_model,
               "nodes": nodes}  # fmt: skip
    if kind in JOB_BACKTESTS:
        from pipelines.backtesting import run_backtest

        for name, value in {**files, **options}.items():
            if value is not None:
                raise click.UsageError(f"--{name} does not go with backtest {kind}: it reads --jobs")
        if jobs is None:
            raise click.UsageError(f"backtest {kind} needs --jobs FILE")
        run_backtest(kind, jobs, out, seed=seed, threads=threads, refit_days=refit_days or 7.0)
        return
    from pipelines.event_backtesting import EventBacktestError, parse_horizons, run_event_backtest

    if jobs is not None:
        raise click.UsageError(f"--jobs does not go with backtest {kind}: it goes with {', '.join(JOB_BACKTESTS)}")
    try:
        run_event_backtest(
            kind, files, out, bottleneck_class=bottleneck_class, quantity=quantity,
            horizons_s=None if horizons is None else parse_horizons(horizons), gpu_model=gpu_model, nodes=nodes,
            seed=seed, threads=threads, refit_days=refit_days,
        )  # fmt: skip
    except EventBacktestError as error:
        raise click.UsageError(str(error)) from None


@cli.command(
    epilog=_example(
        "weatherglass replay --jobs jobs.parquet --nodes 100 --policy easy-sjbf --runtimes forecast --out report",
        "weatherglass replay --jobs jobs.parquet --nodes 512 --unit gpus --policy slurm-actuable --out report",
    )
)
@click.option("--jobs", required=True, type=_FILE, help="Jobs file, as of backtest runtime.")
@click.option("--nodes", required=True, type=click.IntRange(1), help="Processors of the cluster: GPUs, nodes or CPUs.")
@click.option(
    "--policy",
    type=click.Choice(["fcfs", "easy", "easy-sjbf", "conservative", "slurm-actuable"]),
    default="slurm-actuable",
    show_default=True,
    help="How waiting jobs are started.",
)
@click.option(
    "--runtimes",
    type=click.Choice(["limit", "forecast", "true"]),
    default="limit",
    show_default=True,
    help="What planning believes of runtimes; forecast: from jobs that ended in the replay.",
)
@click.option(
    "--unit", type=click.Choice(["gpus", "nodes", "cpus"]), help="What --nodes counts (default: as the jobs tell)."
)
@click.option(
    "--draws", type=click.IntRange(0, 1_000), default=10, show_default=True, help="Shaken inputs of each kind."
)
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder of the outcome.")
def replay(jobs: Path, nodes: int, policy: str, runtimes: str, unit: str | None, draws: int, out: Path) -> None:
    """Replay recorded jobs under a scheduling policy.

    Writes schedule.parquet, report.json and report.html, and prints every figure beside those of other policies; what
    an unpatched Slurm can do stands first.
    """
    from models.replay.workload import ReplayError
    from pipelines.replaying import run_replay

    try:
        run_replay(jobs, nodes, policy, runtimes, out, unit=unit, draws=draws)
    except ReplayError as error:
        raise click.UsageError(str(error)) from None


@cli.command(epilog=_example("weatherglass record --seconds 3600 --every 0.1 --out gpus.parquet"))
@click.option("--seconds", type=_Number(0.1, 604_800), required=True, help="How long.")
@click.option("--every", type=_Number(0.02, 3600), default=1.0, show_default=True, help="Seconds between samples.")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Parquet file to be made.")
@click.option("--cluster", default="local", show_default=True, help="Name of the cluster in the rows.")
@click.option("--node", help="Name of the node in the rows (default: this host's).")
def record(seconds: float, every: float, out: Path, cluster: str, node: str | None) -> None:
    """Record the GPUs of this host.

    Samples them by NVML into a file of canonical telemetry, to import or to backtest on. Needs an NVIDIA driver, no
    settings and no root. Ctrl-C ends early and keeps what there is.
    """
    from pipelines.recording import print_recording

    print_recording(out, seconds=seconds, every_s=every, cluster=cluster, node=node)


@cli.command(epilog=_example("weatherglass outcomes", "weatherglass outcomes --cluster prod --so-far"))
@_cluster
@click.option("--so-far", is_flag=True, help="Of the seven days that end now; nothing is kept.")
def outcomes(cluster: str | None, so_far: bool) -> None:
    """Score published forecasts by what came.

    Of the last seven full days, as every night: whether runtimes were calibrated and better than the best baseline,
    whether jobs still ask for what they used to, how much published starts move, and how they stand beside the
    scheduler's own.
    """
    from pipelines.outcome_report import print_outcomes

    print_outcomes(_settings(), cluster, is_so_far=so_far)


_LLAMA = "--layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256 --seq 8192"


@cli.command("estimate-memory", epilog=_example(f"weatherglass estimate-memory {_LLAMA} --gpu-memory 80GiB"))
@click.option("--layers", type=int, required=True, help="Transformer layers.")
@click.option("--hidden", type=int, required=True, help="Width of the model.")
@click.option("--heads", type=int, required=True, help="Attention heads.")
@click.option("--vocab", type=int, required=True, help="Entries of the vocabulary, padded.")
@click.option("--seq", type=int, required=True, help="Tokens of a sequence.")
@click.option("--micro-batch", type=int, default=1, show_default=True, help="Sequences of a GPU at once.")
@click.option("--kv-heads", type=int, help="Heads of keys and values (default: --heads).")
@click.option("--ffn", type=int, help="Width of the feed-forward layer (default: 4 or 8/3 × --hidden).")
@click.option("--architecture", default="llama", show_default=True, help="gpt or llama.")
@click.option("--tied/--untied", "is_tied", default=None, help="One matrix for both embeddings, or two.")
@click.option("--precision", default="bf16", show_default=True, help="bf16, fp16, fp32 or fp8.")
@click.option("--gradient-precision", default="same", show_default=True, help="same or fp32.")
@click.option(
    "--optimizer", default="adam", show_default=True, help="adam, adam_bf16, adam_8bit, lion, sgd or sgd_momentum."
)
@click.option("--tensor-parallel", "--tp", type=int, default=1, show_default=True, help="GPUs that share a layer.")
@click.option("--sequence-parallel", "is_sequence_parallel", is_flag=True, help="Share norms and dropouts too.")
@click.option("--pipeline-parallel", "--pp", type=int, default=1, show_default=True, help="Stages of the pipeline.")
@click.option("--virtual-stages", type=int, default=1, show_default=True, help="Chunks of layers of a stage.")
@click.option("--microbatches", type=int, help="Microbatches of a step (default: as many as stages).")
@click.option("--data-parallel", "--dp", type=int, default=1, show_default=True, help="Replicas.")
@click.option("--zero", "zero_stage", type=int, default=0, show_default=True, help="ZeRO stage 0-3; FSDP is 3.")
@click.option("--recompute", "recomputation", default="none", show_default=True, help="none, selective or full.")
@click.option("--flash/--no-flash", "is_flash", default=True, show_default=True, help="Flash attention.")
@click.option("--experts", type=int, default=1, show_default=True, help="Experts of a layer.")
@click.option("--experts-per-token", type=int, default=1, show_default=True, help="Experts that a token visits.")
@click.option("--expert-parallel", "--ep", type=int, default=1, show_default=True, help="Replicas sharing experts.")
@click.option("--context-parallel", "--cp", type=int, default=1, show_default=True, help="GPUs that share a sequence.")
@click.option("--lora-rank", type=int, help="Rank of LoRA adapters; all else is frozen (default: all is trained).")
@click.option("--lora-targets", default="qv", show_default=True, help="qv, attention or all.")
@click.option("--base-precision", default="same", show_default=True, help="Of what is frozen: same or nf4 (QLoRA).")
@click.option("--gpu-memory", metavar="SIZE", help="Of one GPU, as 80GiB: does it fit, what would make it fit?")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as the API answers.")
def estimate_memory(gpu_memory: str | None, as_json: bool, **asked: Any) -> None:
    """Estimate the device memory a training job needs.

    From published formulas, line by line with their sources. Wants no settings. Exit code 1 when it does not fit.
    """
    from models.memory_inputs import MemoryInputError, Training, parse_size
    from pipelines.memory_report import print_estimate

    try:
        capacity_bytes = None if gpu_memory is None else parse_size(gpu_memory)
        training = Training(**asked)
    except MemoryInputError as error:
        raise click.UsageError(str(error)) from None
    raise SystemExit(0 if print_estimate(training, capacity_bytes, as_json=as_json) else 1)


@cli.command("communication", epilog=_example("weatherglass communication --cluster prod --since 30m"))
@_cluster
@click.option("--since", type=_Length(), default="15m", show_default=True, metavar="TIME", help="How far back, as 30m.")
@click.option("--top", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Jobs, and links, at most.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, all of it.")
def communication(cluster: str | None, since: timedelta, top: int, as_json: bool) -> None:
    """Show what share of their steps jobs communicate.

    Beside it how far the slowest rank of each is behind its gang, and which NVLinks and network ports are full.
    """
    from pipelines.communication_report import print_communication

    print_communication(_settings(), cluster, datetime.now(UTC), since, top=top, as_json=as_json)


@cli.command("memory-use", epilog=_example("weatherglass memory-use --cluster prod --since 14d"))
@_cluster
@click.option("--since", type=_Length(), default="7d", show_default=True, metavar="TIME", help="How far back, as 14d.")
@click.option("--top", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Lines at most.")
@click.option("--models", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="TOML: what jobs train.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, all of it.")
def memory_use(cluster: str | None, since: timedelta, top: int, models: Path | None, as_json: bool) -> None:
    """Show device memory that jobs had and used.

    By user and name family, those that leave most unused first, and which smaller slice or GPU would hold them. With
    --models, what the estimator says that they need stands beside.
    """
    from pipelines.memory_report import print_memory_use

    print_memory_use(_settings(), cluster, datetime.now(UTC), since, top=top, as_json=as_json, models=models)


@cli.command(
    "checkpoint-advice",
    epilog=_example("weatherglass checkpoint-advice --gpus 1024 --checkpoint-s 60 --cluster prod --runtime 7d"),
)
@click.option("--gpus", type=click.IntRange(1, 10_000_000), required=True, help="GPUs of the job.")
@click.option("--checkpoint-s", type=_Number(0.001, 1e6), required=True, help="Seconds a checkpoint stops it.")
@click.option("--restart-s", type=_Number(0, 1e6), default=300, show_default=True, help="Seconds from failure to work.")
@click.option("--gpus-per-node", type=click.IntRange(1, 1024), help="Default: as the inventory has it, else 8.")
@click.option("--runtime", type=_Length(), metavar="TIME", help="Length of a run, as 7d: what it is expected to lose.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_cluster
def checkpoint_advice(
    gpus: int,
    checkpoint_s: float,
    restart_s: float,
    gpus_per_node: int | None,
    runtime: timedelta | None,
    as_json: bool,
    cluster: str | None,
) -> None:
    """Advise how often to write checkpoints.

    By Daly's and Young's rules, from the hardware failures that jobs of the size have met on the cluster; without
    clusters in the settings, from published rates.
    """
    from pipelines.checkpoint_report import advise_checkpoints

    advise_checkpoints(
        _settings(),
        cluster,
        datetime.now(UTC),
        gpus=gpus,
        checkpoint_s=checkpoint_s,
        restart_s=restart_s,
        gpus_per_node=gpus_per_node,
        runtime=runtime,
        as_json=as_json,
    )


@cli.command(epilog=_example("weatherglass maintain"))
def maintain() -> None:
    """Compact the store and apply retention."""
    from pipelines.commands import maintain_once

    maintain_once(_settings())


@cli.command(epilog=_example("weatherglass nowcast --cluster prod"))
@_cluster
def nowcast(cluster: str | None) -> None:
    """Run the nowcast of one cluster.

    Newest samples in, hints out, every tick.
    """
    from pipelines.compose import run_nowcast

    run_nowcast(_settings(), cluster)


@cli.command(epilog=_example("weatherglass api", "weatherglass api --insecure"))
@click.option("--insecure", is_flag=True, help="Listen on a public address without tokens.")
def api(insecure: bool) -> None:
    """Serve the hints API."""
    from pipelines.compose import run_api

    run_api(_settings(), insecure)


@cli.command(epilog=_example("weatherglass dashboards"))
def dashboards() -> None:
    """Serve the dashboards."""
    from pipelines.compose import run_dashboards

    run_dashboards(_settings())


@cli.group("slurm-agent", invoke_without_command=True, epilog=_example("weatherglass slurm-agent --mode advise"))
@click.option("--mode", type=click.Choice(["advise", "reserve"]), help="Overrides slurm_agent.mode.")
@click.option("--once", is_flag=True, help="One round, then stop.")
@click.pass_context
def slurm_agent(ctx: click.Context, mode: str | None, once: bool) -> None:
    """Follow the hints on a Slurm cluster.

    In `advise` mode it says what it would do; in `reserve` mode it holds nodes by leases.
    """
    if ctx.invoked_subcommand is None:
        from pipelines.compose import run_slurm_agent

        run_slurm_agent(_settings(), mode, once)


@slurm_agent.command("release", epilog=_example("weatherglass slurm-agent release"))
def slurm_agent_release() -> None:
    """Remove every lease that the agent made (reservations named wg_…)."""
    from pipelines.compose import release_leases

    release_leases(_settings())


@cli.group(
    "kubernetes-agent", invoke_without_command=True, epilog=_example("weatherglass kubernetes-agent --mode annotate")
)
@click.option("--mode", type=click.Choice(["advise", "annotate", "taint"]), help="Overrides kubernetes.mode.")
@click.option("--once", is_flag=True, help="One round, then stop.")
@click.pass_context
def kubernetes_agent(ctx: click.Context, mode: str | None, once: bool) -> None:
    """Follow the hints on a Kubernetes cluster.

    In `advise` mode it says what it would do; else it annotates nodes, and in `taint` mode taints a few.
    """
    if ctx.invoked_subcommand is None:
        from pipelines.compose import run_kubernetes_agent

        run_kubernetes_agent(_settings(), mode, once)


@kubernetes_agent.command("release", epilog=_example("weatherglass kubernetes-agent release"))
def kubernetes_agent_release() -> None:
    """Take every annotation and taint of the agent off."""
    from pipelines.compose import release_marks

    release_marks(_settings())


@cli.group(cls=_Group, epilog=_example("weatherglass models list"))
def models() -> None:
    """Look at models, promote, roll back.

    TASK is one of runtime, wait, job_failure, node_failure, bottleneck, level.
    """


_task = click.argument("task", type=click.Choice(TASKS), metavar="TASK")


@models.command("list", epilog=_example("weatherglass models list --cluster prod"))
@_cluster
def models_list(cluster: str | None) -> None:
    """List versions of every task with their scores; * marks the champion."""
    from pipelines.model_report import list_models

    list_models(_settings(), cluster)


@models.command("show", epilog=_example("weatherglass models show runtime", "weatherglass models show runtime VERSION"))
@_task
@click.argument("version", required=False)
@_cluster
@click.option("--json", "as_json", is_flag=True, help="The whole card.")
def models_show(task: str, version: str | None, cluster: str | None, as_json: bool) -> None:
    """Show what a model learnt from, its figures and why it is in charge or not (default: the champion)."""
    from pipelines.model_report import show_model

    show_model(_settings(), cluster, task, version, as_json=as_json)


@models.command(
    "promote", epilog=_example('weatherglass models promote runtime VERSION --reason "better on long jobs"')
)
@_task
@click.argument("version")
@click.option("--reason", required=True, help="Why; kept in the registry.")
@_cluster
def models_promote(task: str, version: str, reason: str, cluster: str | None) -> None:
    """Make a version the champion."""
    from pipelines.model_report import promote_model

    promote_model(_settings(), cluster, task, version, reason)


@models.command("rollback", epilog=_example('weatherglass models rollback runtime --reason "worse since Monday"'))
@_task
@click.option("--reason", required=True, help="Why; kept in the registry.")
@_cluster
def models_rollback(task: str, reason: str, cluster: str | None) -> None:
    """Make the previous champion the champion again.

    Where there is none, the baseline takes charge: this is how a bad first model is switched off.
    """
    from pipelines.model_report import rollback_model

    rollback_model(_settings(), cluster, task, reason)


@cli.group(cls=_Group, epilog=_example("weatherglass token create dashboards", "weatherglass token list"))
def token() -> None:
    """Make, list and revoke API tokens."""


@token.command("create", epilog=_example("weatherglass token create slurm --role read --cluster prod"))
@click.argument("name")
@click.option("--role", type=click.Choice(["read", "place", "admin"]), default="read", show_default=True)
@click.option("--cluster", "clusters", multiple=True, help="Only this cluster (repeatable; default: all).")
def token_create(name: str, role: str, clusters: tuple[str, ...]) -> None:
    """Make a token.

    It is printed once and stored hashed in api.tokens_file.
    """
    from pipelines.commands import make_token

    make_token(_settings(), name, role, clusters)


@token.command("list", epilog=_example("weatherglass token list"))
def token_list() -> None:
    """List names, roles and clusters of all tokens; the tokens themselves are stored nowhere."""
    from pipelines.commands import list_tokens

    list_tokens(_settings())


@token.command("revoke", epilog=_example("weatherglass token revoke slurm"))
@click.argument("name")
def token_revoke(name: str) -> None:
    """Revoke a token: a running API refuses it within a second."""
    from pipelines.commands import remove_token

    remove_token(_settings(), name)


@cli.group(cls=_Group, epilog=_example("weatherglass config check"))
def config() -> None:
    """Check the settings file or print the example."""


@config.command("check", epilog=_example("weatherglass --config prod.toml config check"))
def config_check() -> None:
    """Read the settings and say whether they are right.

    Files, certificates and folders that they name are looked at, and so are the ports of one host.
    """
    from pipelines.commands import check_settings

    check_settings(_settings(with_files=True))


@config.command("example", epilog=_example("weatherglass config example > weatherglass.toml"))
def config_example() -> None:
    """Print every setting with default, unit and meaning."""
    from pipelines.example import example

    click.echo(example(), nl=False)


@cli.command(epilog=_example("weatherglass metrics nvlink", "weatherglass metrics --column gpu_power_w"))
@click.argument("text", required=False, default="")
@click.option("--column", default="", help="Only what feeds this column.")
@click.option("--cluster", help="With the own mappings of this cluster.")
@click.option("--markdown", is_flag=True, help="Print docs/metrics.md.")
def metrics(text: str, column: str, cluster: str | None, markdown: bool) -> None:
    """List known metrics and what they feed.

    TEXT is a part of a metric's or an exporter's name.
    """
    from features.metric_listing import select, to_markdown, to_text
    from features.metrics import DEFAULT
    from features.vocabulary import COLUMNS
    from pipelines.commands import CommandError

    table = _settings().cluster(cluster).metric_table() if cluster else DEFAULT
    if markdown:
        click.echo(to_markdown(table), nl=False)
        return
    rows = select(table, text, column)
    if not rows:
        near = difflib.get_close_matches(column, COLUMNS, n=1)
        meant = f", did you mean {near[0]}?" if near else ""
        known = "" if not column or column in COLUMNS else f": there is no column {column!r}{meant}"
        raise CommandError(f"no metric matches{known}; `weatherglass metrics` lists all")
    click.echo(to_text(rows))


@cli.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    epilog=_example("weatherglass simulate serve --nodes 64 --out sim", "weatherglass simulate history --help"),
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def simulate(arguments: tuple[str, ...]) -> None:
    """Simulate a cluster.

    `serve` runs exporters in real time, `history` writes weeks of telemetry and jobs.
    """
    from simulator.__main__ import main as simulator_main

    simulator_main(list(arguments), prog_name="weatherglass simulate")


@contextlib.contextmanager
def _errors() -> Generator[None]:
    """Expected errors become one clear message and an exit code; anything else keeps its traceback."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        if kind == "SettingsError":
            code = 2
        elif getattr(type(error), "__module__", "").split(".")[0] in _OUR_PACKAGES or isinstance(error, OSError):
            code = 1
        else:
            raise
        click.echo(f"weatherglass: {error}", err=True)
        raise SystemExit(code) from None


_OUR_PACKAGES = {"pipelines", "features", "models", "scheduler_hints", "dashboards", "simulator"}


def main() -> None:
    """Entry point of the `weatherglass` command."""
    os.environ.setdefault("DAGSTER_DISABLE_TELEMETRY", "1")
    try:
        with _errors():
            cli(standalone_mode=True)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
