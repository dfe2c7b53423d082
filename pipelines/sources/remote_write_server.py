"""HTTP receiver of remote-write: who may send, what is accepted, and how each request is answered.

Runs in a thread and hands bodies to the intake; it decodes nothing. Answers follow what senders do
with them: 4xx is given up and logged there, 5xx is sent again, 415 lets a sender of version 2 fall back to version 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server

from scheduler_hints.server import ServerError, listen

__all__ = ["PATH", "READY", "Receiver", "ServerError", "Submit", "listen", "ready_text"]

log = logging.getLogger(__name__)

PATH = "/api/v1/write"
READY = "/-/ready"
_CONNECTIONS = 512
_HEAD_TIMEOUT_S = 30.0
_BODY_TIMEOUT_S = 60.0
_TURN_S = 10.0  # a request waits this long for its turn; a sender's own patience is 30 s
_MAX_HEAD_BYTES = 64 * 1024
_DRAINED = 16  # times the largest body
_STOP_S = 5.0
_RETRY_AFTER_S = 5
# A thread of the server outlives it by a moment; if the interpreter ended meanwhile, it would abort the process.
_SETTLE_S = 0.3

Submit = Callable[[str, bytes], Future[tuple[int, str]]]


class _RefusedError(Exception):
    """A request that is not taken: status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class _PutOffError(_RefusedError):
    """A request that may well be taken later."""


class _CutError(Exception):
    """The connection ended before the body."""


class _Budget:
    """Bytes of bodies that may be held at a time; whoever wants more waits, and not for ever."""

    def __init__(self, size: int) -> None:
        self._left = self._size = size
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def hold(self, size: int) -> Any:
        size = min(size, self._size)
        try:
            async with asyncio.timeout(_TURN_S), self._changed:
                await self._changed.wait_for(lambda: self._left >= size)
                self._left -= size
        except TimeoutError:
            raise _PutOffError(503, "samples come faster than they can be taken; send this again later") from None
        try:
            yield
        finally:
            async with self._changed:
                self._left += size
                self._changed.notify_all()


class _Application:
    """The ASGI application."""

    def __init__(self, submit: Submit, token: str, most_bytes: int, instance: str, put_off: Callable[[], None]) -> None:
        self._submit, self._token, self._most_bytes = submit, token.encode(), most_bytes
        self._instance, self._put_off = instance, put_off
        self._budget = _Budget(2 * most_bytes)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        try:
            status, text = await self._answer(scope, receive)
        except _RefusedError as refused:
            status, text = refused.status, refused.text
            if isinstance(refused, _PutOffError):
                self._put_off()
            await self._drain(receive)
        except _CutError:
            status, text = 400, "the body ended too early"
        except TimeoutError:
            status, text = 408, f"the body did not arrive within {_BODY_TIMEOUT_S:g} s"
        body = f"{text}\n".encode() if text else b""
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        if status == 204:
            headers = []
        if status == 503:
            headers.append((b"retry-after", str(_RETRY_AFTER_S).encode()))
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Any, receive: Any) -> tuple[int, str]:
        if scope["path"] == READY and scope["method"] == "GET":
            return 200, ready_text(self._instance)  # without a token: it tells nothing but that it is there
        if scope["path"] != PATH:
            raise _RefusedError(404, f"only {PATH} is here")
        if scope["method"] != "POST":
            raise _RefusedError(405, f"{PATH} takes POST")
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self._token:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
                raise _RefusedError(401, "a bearer token is needed: authorization.credentials_file of remote_write")
        _check_kind(headers)
        length = _length(headers)
        if length is not None and length > self._most_bytes:
            raise _RefusedError(413, f"the body is {length} bytes; at most {self._most_bytes} are taken")
        async with self._budget.hold(self._most_bytes if length is None else length):
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                body = await self._body(receive)
            if length is not None and len(body) != length:
                raise _CutError
            sender = (scope.get("client") or ("unknown",))[0]
            return await asyncio.wrap_future(self._submit(sender, body))

    async def _drain(self, receive: Any) -> None:
        """Read what is still sent: a sender that is cut off does not see its answer, and sends the same for ever."""
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                while size < _DRAINED * self._most_bytes:
                    message = await receive()
                    size += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return

    async def _body(self, receive: Any) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _CutError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most_bytes:
                raise _RefusedError(413, f"the body is over {self._most_bytes} bytes")
            if not message.get("more_body", False):
                return b"".join(parts)


def _check_kind(headers: dict[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"application/x-protobuf").decode("latin-1").lower()
    media, _, options = kind.partition(";")
    proto = next((o.split("=", 1)[1].strip() for o in options.split(";") if o.strip().startswith("proto=")), "")
    version = headers.get(b"x-prometheus-remote-write-version", b"0.1.0").decode("latin-1")
    if media.strip() != "application/x-protobuf" or proto not in ("", "prometheus.writerequest"):
        raise _RefusedError(
            415, f"content type {kind!r}: only application/x-protobuf;proto=prometheus.WriteRequest is read"
        )
    if not version.startswith("0.") and not version.startswith("1."):
        raise _RefusedError(415, f"remote-write version {version!r}: only version 1 (header 0.1.0) is read")
    encoding = headers.get(b"content-encoding", b"snappy").decode("latin-1").lower()
    if encoding != "snappy":
        raise _RefusedError(415, f"content encoding {encoding!r}: only snappy is read")


def _length(headers: dict[bytes, bytes]) -> int | None:
    text = headers.get(b"content-length", b"")
    return int(text) if text.isdigit() else None


class _Embedded(Server):
    """Granian's embedded server on a socket of ours."""

    def __init__(self, listener: socket.socket, **options: Any) -> None:
        host, port = listener.getsockname()[:2]
        super().__init__(address=host, port=port, **options)
        self._listener = listener

    def _init_shared_socket(self) -> None:
        # The holder owns the descriptor. Its stub does not declare: descriptor, is it a Unix socket, backlog.
        self._shd = SocketHolder(self._listener.detach(), False, _CONNECTIONS)  # ty: ignore[too-many-positional-arguments]

    def let_go(self) -> None:
        """Have the socket closed even where the loop has ended under the server; by itself it would listen on."""
        for worker in self.wrks:
            worker._sig.set()


def ready_text(instance: str) -> str:
    """What a receiver answers at `READY`."""
    return f"remote-write receiver of Weatherglass {instance}"


class Receiver:
    """Serves a listening socket in a thread until it is closed.

    Args:
        listener: As `listen` makes it; the receiver closes it.
        submit: Takes the sender's address and a body; the answer is (status, text).
        token: Bearer token that senders must give; empty: none.
        most_bytes: Largest body, as sent.
        cert_file: PEM of its certificate, which was checked; empty: plain http.
        key_file: PEM of the certificate's key; empty: it stands in `cert_file`.
        put_off: Called for each request that was not taken for want of room, and that its sender will send again.

    Raises:
        ServerError: It did not start.
    """

    def __init__(
        self,
        listener: socket.socket,
        submit: Submit,
        *,
        token: str = "",
        most_bytes: int,
        cert_file: str = "",
        key_file: str = "",
        put_off: Callable[[], None] = lambda: None,
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self.instance = secrets.token_hex(8)
        tls = {"ssl_cert": Path(cert_file), "ssl_key": Path(key_file or cert_file)}
        self._tls: dict[str, Any] = {**tls, "ssl_protocol_min": SSLProtocols.tls12} if cert_file else {}
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._make = lambda: _Application(submit, token, most_bytes, self.instance, put_off)
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name=f"remote-write-http-{self.port}", daemon=True
        )
        self._thread.start()
        if not self._ready.wait(10):
            raise ServerError(f"the receiver on port {self.port} did not start")

    def is_running(self) -> bool:
        """It still answers."""
        return self._thread.is_alive()

    def _run(self, listener: socket.socket) -> None:
        try:
            asyncio.run(self._serve(listener))
        except Exception:
            log.exception("the remote-write receiver on port %d has ended", self.port)
            time.sleep(_SETTLE_S)  # its port is free then
        finally:
            listener.close()

    async def _serve(self, listener: socket.socket) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        server = _Embedded(
            listener,
            target=self._make(),
            interface=Interfaces.ASGI,
            http=HTTPModes.http1,
            websockets=False,
            backpressure=_CONNECTIONS,
            http1_settings=HTTP1Settings(
                header_read_timeout=int(_HEAD_TIMEOUT_S * 1000), max_buffer_size=_MAX_HEAD_BYTES
            ),
            log_level=LogLevels.error,
            **self._tls,
        )
        server.on_startup(self._ready.set)
        serving = asyncio.create_task(server.serve())
        waiting = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # however it ends: the port must be free for the next
            waiting.cancel()
            server.stop()
            if not self._stopping.is_set():
                server.let_go()
        done, _ = await asyncio.wait({serving}, timeout=_STOP_S)
        if done:
            serving.result()
            await asyncio.sleep(_SETTLE_S)
            return
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # what is cut has nothing more to say
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    def close(self) -> None:
        """Finish requests under way, for at most a few seconds, and stop listening."""
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(_STOP_S + 5)
