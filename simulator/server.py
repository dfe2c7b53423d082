"""The server under the exporter: its port, its clock and its end.

What is answered is in `exporter.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime

from simulator.exporter import Exporter
from simulator.hardware import SimulatorError


async def _keep_time(exporter: Exporter) -> None:
    """Advance to each multiple of the tick as the wall clock passes it."""
    tick_s = exporter.cluster.tick_s
    while True:
        now = time.time()
        due = (int(now / tick_s) + 1) * tick_s
        await asyncio.sleep(max(0.0, due - now))
        exporter.tick(datetime.fromtimestamp(due, UTC))


def check_port(host: str, port: int) -> None:
    """Find out early whether the port can be listened on.

    Raises:
        SimulatorError: It cannot; the message says why and what to do.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        reason = error.strerror or error
        raise SimulatorError(f"{host}:{port} cannot be listened on: {reason}; choose another --port") from None


async def serve(exporter: Exporter, host: str, port: int, on_ready: Callable[[], None]) -> None:
    """Answer requests and keep time until SIGINT or SIGTERM.

    Raises:
        SimulatorError: The port cannot be listened on.
    """
    from granian.constants import Interfaces
    from granian.server.embed import Server

    server = Server(exporter, address=host, port=port, interface=Interfaces.ASGINL, websockets=False, log_enabled=False)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    serving = asyncio.create_task(server.serve())
    clock = asyncio.create_task(_keep_time(exporter))
    ready = asyncio.create_task(_wait_until_up(host, port))
    await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        reason = str(serving.exception() or "the server ended").partition("\n")[0]
        raise SimulatorError(f"{host}:{port} cannot be listened on: {reason}")
    on_ready()
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({serving, clock, stop}, return_when=asyncio.FIRST_COMPLETED)
    failure = clock.exception() if clock.done() and not clock.cancelled() else None
    clock.cancel()
    server.stop()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait({serving}, timeout=2)
    if failure is not None:
        raise failure


async def _wait_until_up(host: str, port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return
