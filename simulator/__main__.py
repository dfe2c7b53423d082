"""Command line of the simulator: `weatherglass simulate serve|history`, or `python -m simulator serve|history`.

Parses arguments and calls; what is simulated stands in the other modules.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from simulator.rates import PRESETS, Rates

_SCALE = "Base rates of bottleneck onsets and node faults, times this."
_RATES = "Which base rates; every-class: of all classes; published: no higher than published; none: fault-free."


def _common(function):
    options = [
        click.option("--nodes", default=32, show_default=True, type=click.IntRange(1, 20_000), help="Nodes of 8 GPUs."),
        click.option("--seed", default=7, show_default=True, help="Seed of everything random."),
        click.option("--cluster", default="demo", show_default=True, help="Name of the cluster."),
        click.option("--gpu-model", default="NVIDIA H100 80GB HBM3", show_default=True, help="Model of every GPU."),
        click.option("--load", default=0.9, show_default=True, type=click.FloatRange(0, 10),
                     help="GPU time asked for, over GPU time there is."),
        click.option("--fault-scale", default=1.0, show_default=True, type=click.FloatRange(0, 10_000), help=_SCALE),
        click.option("--rates", default="default", show_default=True, type=click.Choice(list(PRESETS)), help=_RATES),
        click.option("--job-trace", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                     help="Canonical jobs Parquet to replay, in place of simulated users."),
        click.option("--jobs-days", default=21.0, show_default=True, type=click.FloatRange(0, 3650),
                     help="Days of jobs behind the telemetry."),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Simulate a GPU cluster: exporters, jobs, and faults with known ground truth."""


@main.command(epilog="Example: weatherglass simulate serve --nodes 32 --port 8703 --out sim --fault-scale 20")
@_common
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; nothing is protected.")
@click.option("--port", default=8703, show_default=True, type=click.IntRange(1, 65_535), help="Port to listen on.")
@click.option("--tick-s", default=5.0, show_default=True, type=click.FloatRange(0.5, 600),
              help="Exporters take a sample this often, s.")  # fmt: skip
@click.option("--history-hours", default=6.0, show_default=True, type=click.FloatRange(0, 24 * 366),
              help="Hours of telemetry behind the start.")  # fmt: skip
@click.option("--out", default=Path("sim"), show_default=True, type=click.Path(file_okay=False, path_type=Path),
              help="Folder of the files it writes and keeps current.")  # fmt: skip
@click.option("--external-jobs", is_flag=True, help="No users and no scheduler: jobs come through POST /control/jobs.")
def serve(
    nodes: int, seed: int, cluster: str, gpu_model: str, load: float, fault_scale: float, rates: str,
    job_trace: Path | None, jobs_days: float, host: str, port: int, tick_s: float, history_hours: float, out: Path,
    external_jobs: bool,
) -> None:  # fmt: skip
    """Write a history up to now, then go on in real time and serve /metrics/<node>, /sd, /truth and /control."""
    from simulator.exporter import Exporter
    from simulator.hardware import SimulatorError
    from simulator.history import aligned, write_history
    from simulator.server import check_port
    from simulator.server import serve as serve_http

    try:
        check_port(host, port)
    except SimulatorError as error:
        raise click.ClickException(str(error)) from None
    begun = time.perf_counter()
    now = aligned(datetime.now(UTC), tick_s)
    behind = timedelta(hours=history_hours)
    simulated = _cluster(
        now - behind - timedelta(days=0 if external_jobs else jobs_days), now - behind, nodes, seed, tick_s, gpu_model,
        job_trace, fault_scale, load, cluster, not external_jobs, rates,
    )  # fmt: skip
    rows = write_history(simulated, out, now, clock=lambda: datetime.now(UTC))
    exporter = Exporter(simulated, f"{host}:{port}", out)
    exporter.exposition.refresh()

    def ready() -> None:
        click.echo(
            f"simulator ready: {nodes} nodes, {8 * nodes} GPUs at http://{host}:{port}/sd; {rows} samples and "
            f"{len(simulated.ended)} ended jobs in {out}; rates: {rates} x {fault_scale:g}; "
            f"{time.perf_counter() - begun:.1f} s"
        )

    asyncio.run(serve_http(exporter, host, port, ready))
    # The server's own threads abort the process now and then when the interpreter is taken down under them (seen
    # three times in forty stops with granian 2.8.9). Everything is written: leave at once.
    sys.stdout.flush()
    os._exit(0)


@main.command(epilog="Example: weatherglass simulate history --nodes 64 --hours 336 --tick-s 60 --out sim")
@_common
@click.option("--tick-s", default=15.0, show_default=True, type=click.FloatRange(0.5, 600),
              help="Seconds between samples.")  # fmt: skip
@click.option("--hours", default=24.0, show_default=True, type=click.FloatRange(0, 24 * 3660),
              help="Hours of telemetry.")  # fmt: skip
@click.option("--until", type=click.DateTime(["%Y-%m-%dT%H:%M:%S", "%Y-%m-%d"]), help="End, UTC; default: now.")
@click.option("--out", default=Path("sim"), show_default=True, type=click.Path(file_okay=False, path_type=Path),
              help="Folder of the files it writes.")  # fmt: skip
def history(
    nodes: int, seed: int, cluster: str, gpu_model: str, load: float, fault_scale: float, rates: str,
    job_trace: Path | None, jobs_days: float, tick_s: float, hours: float, until: datetime | None, out: Path,
) -> None:  # fmt: skip
    """Write telemetry, jobs, faults and ground truth as files, and end."""
    from simulator.history import aligned, write_history

    begun = time.perf_counter()
    end = aligned(until.replace(tzinfo=UTC) if until is not None else datetime.now(UTC), tick_s)
    telemetry_at = end - timedelta(hours=hours)
    simulated = _cluster(
        telemetry_at - timedelta(days=jobs_days), telemetry_at, nodes, seed, tick_s, gpu_model, job_trace, fault_scale,
        load, cluster, True, rates,
    )  # fmt: skip
    rows = write_history(simulated, out, end)
    spent = time.perf_counter() - begun
    click.echo(
        f"{rows} samples of {8 * nodes} GPUs, {len(simulated.ended)} ended jobs, {len(simulated.truth)} onsets, "
        f"{len(simulated.faults)} node faults in {out}; rates: {rates} x {fault_scale:g}; {spent:.1f} s, "
        f"{rows / spent:,.0f} samples/s"
    )


def _cluster(
    start: datetime,
    telemetry_at: datetime,
    nodes: int,
    seed: int,
    tick_s: float,
    gpu_model: str,
    job_trace: Path | None,
    fault_scale: float,
    load: float,
    name: str,
    own_jobs: bool,
    rates: str,
):
    from simulator.cluster import SimulatedCluster
    from simulator.hardware import SimulatorError

    # From midnight: a restart on the same day meets the same jobs under the same ids.
    start = start.replace(hour=0, minute=0, second=0, microsecond=0)
    try:
        simulated = SimulatedCluster(
            nodes, seed, start, tick_s, gpu_model, job_trace, fault_scale, load, cluster=name, own_jobs=own_jobs,
            rates=Rates.preset(rates),
        )  # fmt: skip
    except SimulatorError as error:
        raise click.ClickException(str(error)) from None
    simulated.advance_jobs(telemetry_at)
    return simulated


if __name__ == "__main__":
    sys.exit(main())
