"""The HTTP server: serves an ASGI application from this one process until it is told to stop.

One process: killed in whatever way, it leaves no worker behind. Time-outs against slow clients are here: a request head
must arrive within `HEAD_TIMEOUT_S` (an idle connection is closed after it too), and a client that does not read its
answer is dropped after `SEND_TIMEOUT_S`. What is served is not this module's business.

    python -m scheduler_hints.server --published var/published --cluster alpha
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server

from scheduler_hints.dispatch import AsgiApp

log = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 75.0
SEND_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 16 * 1024
CONNECTIONS = 4096
GRACE_S = 5.0


def _allow_files(wanted: int) -> None:
    """Raise the limit of open files, 1,024 on many machines, as far as this user may: a connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


class ServerError(Exception):
    """The server cannot listen; the message says where and why."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket whose connections give up on clients that do not read.

    The port is not shared: a second server on it is refused, where SO_REUSEPORT would split the clients between two.

    Args:
        host: Address, IPv4 or IPv6.
        port: Port; 0 takes a free one.

    Raises:
        ServerError: The address cannot be taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=CONNECTIONS)
    except OSError as error:
        raise ServerError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_TIMEOUT_S * 1000))
    return listener


class _Server(Server):
    """Granian's single-process server on a socket of ours."""

    def __init__(self, listener: socket.socket, **options: Any) -> None:
        host, port = listener.getsockname()[:2]
        super().__init__(address=host, port=port, **options)
        self._listener = listener

    def _init_shared_socket(self) -> None:
        # The holder owns the descriptor. Its stub does not declare: descriptor, is it a Unix socket, backlog.
        self._shd = SocketHolder(self._listener.detach(), False, CONNECTIONS)  # ty: ignore[too-many-positional-arguments]


def serve(
    factory: Callable[[], AsgiApp],
    host: str,
    port: int,
    *,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    on_listening: Callable[[int], object] | None = None,
    head_timeout_s: float = HEAD_TIMEOUT_S,
) -> None:
    """Serve until SIGTERM or SIGINT; requests under way are finished, for at most `GRACE_S`.

    Call it from the main thread of a process that does nothing else.

    Args:
        factory: Makes the ASGI application, inside the running loop.
        host: Address to listen on; `tokens.check_bind` says whether that is wise.
        port: Port; 0 takes a free one.
        tls_cert: Certificate, PEM; with `tls_key` it serves HTTPS.
        tls_key: Its key, PEM.
        on_listening: Called with the port as soon as it accepts connections.
        head_timeout_s: A request head must arrive within this; an idle connection is kept this long.

    Raises:
        ServerError: The address cannot be taken.
    """
    _allow_files(2 * CONNECTIONS)
    listener = listen(host, port)
    try:
        with _runner() as runner:
            runner.run(_serve(listener, factory, tls_cert, tls_key, on_listening, head_timeout_s))
    finally:
        listener.close()


def _runner() -> asyncio.Runner:
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def _serve(
    listener: socket.socket,
    factory: Callable[[], AsgiApp],
    tls_cert: Path | None,
    tls_key: Path | None,
    on_listening: Callable[[int], object] | None,
    head_timeout_s: float,
) -> None:
    application = factory()
    server = _Server(
        listener,
        target=application,
        interface=Interfaces.ASGI,
        http=HTTPModes.http1,
        websockets=False,
        backpressure=CONNECTIONS,
        http1_settings=HTTP1Settings(header_read_timeout=int(head_timeout_s * 1000), max_buffer_size=MAX_HEAD_BYTES),
        log_level=LogLevels.error,
        ssl_cert=tls_cert,
        ssl_key=tls_key,
    )
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if on_listening is not None:
        port = listener.getsockname()[1]
        server.on_startup(lambda: on_listening(port))
    sys.setswitchinterval(0.0005)  # a request waits no longer than this for a thread that reads snapshots
    # What is alive now lives for ever: the collector need not walk it again and hold up a request.
    gc.collect()
    gc.freeze()
    serving = asyncio.create_task(server.serve())
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    end_polls = getattr(application, "end_polls", None)  # another application has none
    if end_polls is not None:
        end_polls()
        await asyncio.sleep(0.05)  # their answers are on their way
    server.stop()
    done, _ = await asyncio.wait({serving}, timeout=GRACE_S)
    if done:
        serving.result()
    else:
        log.warning("connections are still open %.0f s after the signal to stop: they are cut", GRACE_S)
        loop.set_exception_handler(lambda *_: None)  # what is cut now has nothing more to say
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve published snapshots without a forecaster: `python -m scheduler_hints.server --help`."""
    from scheduler_hints.api import create_app
    from scheduler_hints.tokens import BindError, TokenError, TokenStore, check_bind

    parser = argparse.ArgumentParser(prog="python -m scheduler_hints.server", description=main.__doc__)
    parser.add_argument("--published", type=Path, required=True, help="folder of snapshots, <cluster>/<kind>.json")
    parser.add_argument("--cluster", action="append", required=True, help="cluster to serve (repeatable)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8700, help="port, 0 for a free one (default: %(default)s)")
    parser.add_argument("--tokens-file", type=Path, help="JSON of hashed tokens")
    parser.add_argument("--insecure", action="store_true", help="listen on any address without tokens")
    parser.add_argument("--tls-cert", type=Path, help="certificate, PEM")
    parser.add_argument("--tls-key", type=Path, help="its key, PEM")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        tokens = TokenStore(options.tokens_file) if options.tokens_file else None
        check_bind(options.host, tokens, options.insecure)
        serve(
            lambda: create_app(options.published, options.cluster, tokens=tokens),
            options.host,
            options.port,
            tls_cert=options.tls_cert,
            tls_key=options.tls_key,
            on_listening=lambda port: print(f"listening on {options.host}:{port}", flush=True),
        )
    except (BindError, TokenError, ServerError) as error:
        print(f"weatherglass: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
