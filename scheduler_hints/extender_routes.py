"""Routes of the Kubernetes scheduler extender: `filter` and `prioritize`, for one cluster each.

To kube-scheduler an error, and an answer without nodes, fails the pod. So whatever is wrong with us (stale, no such
cluster, a token that is not known) is answered with `200` and every candidate; the header `X-Weatherglass` and the
metrics say what it was. Only a body that is none of kube-scheduler's is an error: there are no candidates to pass.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from scheduler_hints.dispatch import Gate
from scheduler_hints.errors import ApiError
from scheduler_hints.extender import (
    ExtenderArgs,
    ExtenderConfig,
    Verdict,
    all_passed,
    decode_args,
    ends_of_windows,
    filtered,
    no_preference,
    prioritized,
    verdicts,
)
from scheduler_hints.queries import parse_query
from scheduler_hints.shards import State

log = logging.getLogger(__name__)

VERBS = ("filter", "prioritize")
MAX_BODY_BYTES = 64 * 2**20
"""12,500 names are half a MiB, as many nodes whole some 150: `nodeCacheCapable` is the way for large clusters."""
KINDS = ("bottlenecks", "node-risks", "backfill-windows")
_encode = msgspec.json.Encoder().encode


class ExtenderRoutes:
    """The two verbs.

    Args:
        gate: Who asks and what is served.
        body: Reads a body of at most so many bytes.
        config: When a node is refused.
    """

    def __init__(
        self, gate: Gate, body: Callable[[Request, int], Awaitable[bytes]], config: ExtenderConfig | None = None
    ) -> None:
        self._gate, self._body = gate, body
        self._config = config or ExtenderConfig()
        self._known: dict[str, tuple[tuple[Any, ...], dict[str, Verdict], dict[str, datetime | None]]] = {}
        self._said: dict[str, str] = {}

    def routes(self) -> list[Route]:
        return [
            Route(f"/k8s{cluster}/{verb}", getattr(self, verb), methods=["POST"])
            for cluster in ("", "/{cluster}")
            for verb in VERBS
        ]

    async def filter(self, request: Request) -> Response:
        args, word, foreseen, _, _ = await self._asked(request)
        return _answer(filtered(args, foreseen, self._config) if foreseen else all_passed(args), word)

    async def prioritize(self, request: Request) -> Response:
        args, word, foreseen, free_until, now = await self._asked(request)
        if word != "fresh":
            return _answer(no_preference(args.names), word)
        return _answer(prioritized(args, foreseen, free_until, now, self._config), word)

    async def _asked(
        self, request: Request
    ) -> tuple[ExtenderArgs, str, dict[str, Verdict], dict[str, datetime | None], datetime]:
        """The arguments, how we stand in a word, what is foreseen of nodes and until when they are free."""
        now = datetime.now(UTC)
        try:
            parse_query(request.scope["query_string"], ())
            cluster = self._cluster(request)
        except ApiError as error:
            args = decode_args(await self._body(request, MAX_BODY_BYTES // 32))
            self._say(error.code, f"{error.message}: every node is passed")
            return args, error.code, {}, {}, now
        args = decode_args(await self._body(request, MAX_BODY_BYTES))
        store = self._gate.store
        now_s = store.clock()
        if all(store.state.fresh(cluster, kind, now_s) is None for kind in ("bottlenecks", "node-risks")):
            self._say(cluster, f"nothing that is foreseen of {cluster} is fresh: every node is passed")
            return args, "stale", {}, {}, now
        self._said.pop(cluster, None)
        foreseen, free_until = self._foreseen(store.state, cluster, now_s, now)
        return args, "fresh", foreseen, free_until, now

    def _cluster(self, request: Request) -> str:
        """The cluster in the path, or the only one there is."""
        header = request.headers.get("authorization")
        principal, visible = self._gate.admit(_bearer(header))
        cluster = request.path_params.get("cluster")
        if cluster is None and len(visible) == 1:
            return visible[0]
        return self._gate.one(principal, visible, cluster or "", is_path=cluster is not None)

    def _foreseen(
        self, state: State, cluster: str, now_s: float, now: datetime
    ) -> tuple[dict[str, Verdict], dict[str, datetime | None]]:
        """What is foreseen now; kept until a shard changes or expires."""
        shards = [state.fresh(cluster, kind, now_s) for kind in KINDS]
        key = tuple(shard and shard.tag for shard in shards)
        kept = self._known.get(cluster)
        if kept is None or kept[0] != key:
            hints, risks, windows = ([] if shard is None else _items(shard.rows, now_s) for shard in shards)
            kept = self._known[cluster] = (key, verdicts(hints, risks), ends_of_windows(windows, now))
        return kept[1], kept[2]

    def _say(self, what: str, words: str) -> None:
        """Log a trouble once, not for each pod."""
        if self._said.get(what) != words:
            self._said[what] = words
            log.warning("%s", words)


def _items(rows: Iterable[Any], now_s: float) -> list[Any]:
    return [row.item for row in rows if now_s < row.deadline_s]


def _bearer(header: str | None) -> bytes | None:
    """An Authorization header; the password of Basic, all that a URL in kube-scheduler can hold, counts as a token."""
    if header is None:
        return None
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "basic":
        try:
            _, _, secret = base64.b64decode(value.strip(), validate=True).decode("ascii").partition(":")
        except ValueError:
            return header.encode("latin-1")
        return b"Bearer " + secret.encode()
    return header.encode("latin-1")


def _answer(content: Any, word: str) -> Response:
    headers = {"cache-control": "no-store", "x-weatherglass": word}
    return Response(_encode(content), headers=headers, media_type="application/json")
