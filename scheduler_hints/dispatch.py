"""The front of the hints API: hot reads are answered here from encoded bytes, everything else goes to Starlette.

Here belong what happens to every request (who asks, which clusters it may see, one error shape, counting) and the
lists and single jobs that schedulers poll. The other routes stand in `routes.py`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from scheduler_hints.answers import Encoded, encode_job, encode_list, matches
from scheduler_hints.errors import ApiError, BadRequestError, ForbiddenError, NotFoundError, encode_error
from scheduler_hints.long_polls import LongPolls
from scheduler_hints.metrics import Metrics
from scheduler_hints.queries import PARAMETERS, parse_query
from scheduler_hints.reloader import ShardStore
from scheduler_hints.schema import KINDS
from scheduler_hints.tokens import ANYONE, Principal, TokenStore

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

LISTS: dict[str, str] = {f"/v1/{kind}": kind for kind in KINDS}
JOB_PREFIX = "/v1/jobs/"
_JOB_ROUTE = "/v1/jobs/{cluster}/{job_id}"
_MAX_ENTRIES = 4096
_MAX_BYTES = 128 * 2**20


class Gate:
    """Who asks and what they may see."""

    def __init__(self, store: ShardStore, tokens: TokenStore | None) -> None:
        self.store = store
        self.tokens = tokens
        self._visible: dict[tuple[str, ...], tuple[str, ...]] = {}

    def admit(self, authorization: bytes | None) -> tuple[Principal, tuple[str, ...]]:
        """The principal behind an `Authorization` header and the clusters it may see.

        Raises:
            UnauthorizedError: Tokens are needed and this is none.
            ForbiddenError: The token may see none of the clusters that are served here.
        """
        principal = ANYONE if self.tokens is None else self.tokens.authenticate(authorization)
        principal.require("read")
        if principal.clusters is None:
            return principal, self.store.clusters
        allowed = frozenset(principal.clusters)
        visible = tuple(name for name in self.store.clusters if name in allowed)
        if not visible:
            raise ForbiddenError("no_cluster", f"the token {principal.name!r} may see none of the clusters served here")
        return principal, visible

    def one(self, principal: Principal, visible: tuple[str, ...], cluster: str, *, is_path: bool = False) -> str:
        """A cluster that was asked for by name, if it may be seen.

        Raises:
            ForbiddenError: The token is limited to other clusters (whether or not this one exists).
            BadRequestError: There is no such cluster; `NotFoundError` when it stood in the path.
        """
        if cluster in visible:
            return cluster
        if principal.clusters is not None:
            words = f"the token {principal.name!r} may not see cluster {cluster!r}; it may see: {', '.join(visible)}"
            raise ForbiddenError("wrong_cluster", words, {"cluster": cluster, "valid": list(visible)})
        words = f"no cluster {cluster!r}; clusters: {', '.join(visible) or 'none is configured'}"
        if is_path:
            raise NotFoundError("unknown_cluster", words, {"cluster": cluster, "valid": list(visible)})
        raise BadRequestError("bad_value", words, {"parameter": "cluster", "value": cluster, "valid": list(visible)})


class Dispatcher:
    """The ASGI application: hot reads itself, lifespan itself, the rest through `cold`."""

    def __init__(self, store: ShardStore, gate: Gate, metrics: Metrics, cold: AsgiApp) -> None:
        self.store = store
        self.gate = gate
        self.metrics = metrics
        self.cold = cold
        self._cache: dict[tuple[str, bytes, tuple[str, ...]], Encoded] = {}
        self._cached_bytes = 0
        self._generation = -1
        self.polls = LongPolls(store)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        path: str = scope["path"]
        kind = LISTS.get(path)
        if kind is None and not path.startswith(JOB_PREFIX):
            await self._cold(scope, receive, send)
            return
        method = scope["method"]
        if method not in ("GET", "HEAD"):
            await self._cold(scope, receive, send)
            return
        route = path if kind is not None else _JOB_ROUTE
        try:
            start, body = self._read(kind, path, scope)
            if start["status"] == 304 and b"wait=" in scope["query_string"]:
                start, body = await self._waited(kind, path, scope, receive, (start, body))
        except ApiError as error:
            await self._fail(error, route, send)
            return
        except Exception as error:
            await self._broke(error, route, send)
            return
        self.metrics.count(route, start["status"])
        await send(start)
        await send({"type": "http.response.body", "body": b"" if method == "HEAD" else body, "more_body": False})

    async def _waited(
        self, kind: str | None, path: str, scope: Scope, receive: Receive, answer: tuple[Message, bytes]
    ) -> tuple[Message, bytes]:
        """The answer to a poll that waits for a change: the first that is no 304, else the last one there was."""
        values = parse_query(scope["query_string"], PARAMETERS[kind] if kind is not None else ())
        until_s = self.store.clock() + float(values.get("wait", 0.0))
        while answer[0]["status"] == 304:
            generation, now_s = self.store.state.generation, self.store.clock()
            # What is kept may not be kept beyond its life: then it is looked at again, and is perhaps a 503.
            left_s = min(until_s - now_s, self._deadline_s(path, scope) - now_s + 0.01)
            is_news = await self.polls.wait(generation, left_s, receive)
            if not is_news and self.store.clock() >= until_s:
                return self._read(kind, path, scope)
            if not is_news and left_s > 0 and self.store.clock() < self._deadline_s(path, scope):
                return answer  # the client has gone, or too many wait
            answer = self._read(kind, path, scope)
        return answer

    def _deadline_s(self, path: str, scope: Scope) -> float:
        """Until when the answer that is kept may be served."""
        _, visible = self.gate.admit(_header(scope, b"authorization"))
        entry = self._cache.get((path, scope["query_string"], visible))
        return entry.deadline_s if entry is not None else self.store.clock()

    def _read(self, kind: str | None, path: str, scope: Scope) -> tuple[Message, bytes]:
        """Start message and body of a hot read."""
        authorization: bytes | None = None
        if_none_match: bytes | None = None
        for name, value in scope["headers"]:
            if name == b"if-none-match":
                if_none_match = value
            elif name == b"authorization":
                authorization = value
        principal, visible = self.gate.admit(authorization)
        query: bytes = scope["query_string"]
        now_s = self.store.clock()
        state = self.store.state
        if state.generation != self._generation:
            self._forget(state.generation)
        key = (path, query, visible)
        entry = self._cache.get(key)
        if entry is None or now_s >= entry.deadline_s:
            if kind is None:
                parse_query(query, ())
                cluster, _, job_id = path.removeprefix(JOB_PREFIX).partition("/")
                if not job_id:
                    raise NotFoundError("not_found", f"no path {path!r}; a job is {_JOB_ROUTE}")
                entry = encode_job(state, self.gate.one(principal, visible, cluster, is_path=True), job_id, now_s)
            else:
                values = parse_query(query, PARAMETERS[kind])
                values.pop("wait", None)
                wanted = values.get("cluster")
                clusters = visible if wanted is None else (self.gate.one(principal, visible, str(wanted)),)
                entry = encode_list(state, kind, clusters, values, now_s)
            self._remember(key, entry)
        if if_none_match is not None and matches(if_none_match, entry.etag):
            return entry.not_modified(now_s), b""
        return entry.at(now_s)

    def _remember(self, key: tuple[str, bytes, tuple[str, ...]], entry: Encoded) -> None:
        if len(self._cache) >= _MAX_ENTRIES or self._cached_bytes + entry.size > _MAX_BYTES:
            self._forget(self._generation)
        self._cache[key] = entry
        self._cached_bytes += entry.size

    def _forget(self, generation: int) -> None:
        self._cache.clear()
        self._cached_bytes = 0
        self._generation = generation

    async def _cold(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0
        is_head = scope["method"] == "HEAD"

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                route = scope.get("route")
                self.metrics.count(getattr(route, "path", "other"), status)
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        try:
            await self.cold(scope, receive, counted)
        except Exception as error:
            if status == 0:
                await self._broke(error, "other", send)
            elif status != 500:  # a 500 has been logged where it was made
                log.exception("%s %s broke off while it was answered", scope["method"], scope["path"])

    async def _fail(self, error: ApiError, route: str, send: Send) -> None:
        self.metrics.count(route, error.status)
        await send_error(send, error.status, error.encode(), error.headers)

    async def _broke(self, error: Exception, route: str, send: Send) -> None:
        self.metrics.count(route, 500)
        await send_error(send, 500, internal_error(error), {})

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.startup()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                self.shutdown()
                await send({"type": "lifespan.shutdown.complete"})
                return

    def end_polls(self) -> None:
        """Answer polls that wait, for the process is to stop. On the event loop."""
        self.polls.end()

    def startup(self) -> None:
        """Read what is published and go on looking; where the server knows no lifespan, call it before serving."""
        self.store.start()

    def shutdown(self) -> None:
        """Stop looking for new snapshots."""
        self.store.stop()


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


async def send_error(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    """Send an error body with its headers."""
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        *((name.encode(), value.encode()) for name, value in headers.items()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def internal_error(error: Exception) -> bytes:
    """Log an exception under an id, and give the body that names the id and nothing else."""
    identity = secrets.token_hex(4)
    log.error("internal error %s", identity, exc_info=error)
    return encode_error("internal_error", f"this should not happen; the log tells more under {identity}", identity)
