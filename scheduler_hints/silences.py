"""Operators' silences: hints that are not to be acted on for a while, by node, class and scope.

One file a cluster, `published/<cluster>/silences.json`, replaced atomically, so that they survive restarts and every
process sees the same. What is over is kept for 90 days: labels of that time are censored by it. Here belong their
shape, the file and what a silence covers; the routes stand in `silence_routes.py`, the store's copy in
`pipelines/exclusions.py`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
from filelock import FileLock, Timeout

from features.labels import LABEL_CLASSES
from scheduler_hints.errors import BadRequestError, NotFoundError, UnavailableError, decode_body
from scheduler_hints.schema import Bottleneck, Scope
from scheduler_hints.snapshot import write_atomically

log = logging.getLogger(__name__)

FILE = "silences.json"
COPY = "silences.copy.json"  # the same once more, for when the file is damaged
KEPT = timedelta(days=90)
LONGEST = timedelta(days=366)
MAX_SILENCES = 2_000
_LOCK_TIMEOUT_S = 5.0
# No control characters: a catalogue in PostgreSQL takes no NUL, and one such row would hold up all others.
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+(?![\s\S])")]
_Time = Annotated[datetime, msgspec.Meta(tz=True)]


class SilenceRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What is to be silenced, 1 at least of `node`, `bottleneck_class` and `scope`; those that are null are any.

    `start` null: from now on. It lasts until `end`, or for `duration_s` from `start` on: one of the two. `who` is taken
    from the token where one is needed.
    """

    cluster: _Text
    reason: _Text
    end: _Time | None = None
    duration_s: Annotated[float, msgspec.Meta(ge=1, le=31_622_400)] | None = None
    node: _Text | None = None
    bottleneck_class: _Text | None = None
    scope: Scope | None = None
    start: _Time | None = None
    who: _Text | None = None


class Silence(msgspec.Struct, frozen=True):
    """A silence from `start` to `end`, UTC; `ended_at`: it was taken back then."""

    id: str
    cluster: str
    node: str | None
    bottleneck_class: str | None
    scope: Scope | None
    start: datetime
    end: datetime
    reason: str
    who: str
    created_at: datetime
    ended_at: datetime | None = None

    @property
    def until(self) -> datetime:
        """When it was really over, or will be."""
        return self.end if self.ended_at is None else max(min(self.end, self.ended_at), self.start)

    def is_active(self, now: datetime) -> bool:
        return self.start <= now < self.until

    def covers(self, hint: Bottleneck) -> bool:
        """Whether it is about a hint: node, class and scope are those, where they are given.

        A silence of a node does not cover what has other nodes too.
        """
        nodes = set(hint.nodes) | ({hint.node} if hint.node else set())
        return (
            (self.node is None or nodes == {self.node})
            and self.bottleneck_class in (None, hint.bottleneck_class)
            and self.scope in (None, hint.scope)
        )


class SilenceList(msgspec.Struct, frozen=True):
    """Silences, the newest first."""

    items: list[Silence]


_request = msgspec.json.Decoder(SilenceRequest)
_file = msgspec.json.Decoder(list[Silence])


def decode_silence(body: bytes, now: datetime) -> SilenceRequest:
    """Decode and check a body.

    Raises:
        BadRequestError: It is not JSON, or a value cannot be.
        InvalidBodyError: It has the wrong shape; the message names the field.
    """
    asked = decode_body(_request, body, {"silence": SilenceRequest})
    if asked.node is None and asked.bottleneck_class is None and asked.scope is None:
        raise _bad("node", None, "at least one of node, bottleneck_class and scope", None)
    if asked.bottleneck_class is not None and asked.bottleneck_class not in LABEL_CLASSES:
        raise _bad("bottleneck_class", asked.bottleneck_class, ", ".join(LABEL_CLASSES), list(LABEL_CLASSES))
    try:
        start, end = _span(asked, now)
    except OverflowError:
        name, at = ("end", asked.end) if asked.start is None else ("start", asked.start)
        raise _bad(name, at and at.isoformat(), "a time of the years 2 to 9997", None) from None
    if start < now - KEPT:
        raise _bad("start", start.isoformat(), f"within the last {KEPT.days} days", None)
    return msgspec.structs.replace(asked, start=start, end=end, duration_s=None)


def _span(asked: SilenceRequest, now: datetime) -> tuple[datetime, datetime]:
    """From when until when, UTC.

    Raises:
        BadRequestError: There is no end, two, or one that cannot be.
        OverflowError: A time lies where calendars end.
    """
    start = (asked.start or now).astimezone(UTC)
    if (asked.end is None) == (asked.duration_s is None):
        raise _bad("end", None, "one of end and duration_s", None)
    end = (asked.end or start + timedelta(seconds=asked.duration_s or 0)).astimezone(UTC)
    if not max(start, now) < end <= max(start, now) + LONGEST:
        raise _bad("end", end.isoformat(), f"after start and now, within {LONGEST.days} days", None)
    return start, end


def _bad(name: str, value: Any, words: str, valid: Any) -> BadRequestError:
    detail = {"parameter": name, "value": value, "valid": words if valid is None else valid}
    return BadRequestError("bad_value", f"{name}={value!r} cannot be; valid: {words}", detail)


def silences_path(published: Path, cluster: str) -> Path:
    """File of a cluster's silences under the published folder."""
    return published / cluster / FILE


def read_silences(published: Path, cluster: str) -> list[Silence]:
    """All that are kept, over ones included; none where there never was a file.

    Where it is damaged or gone its copy is read, and the log tells: a hint that an operator has silenced is not offered
    again because a disk lost a byte.

    Raises:
        OSError: The file cannot be read; `msgspec.DecodeError` when it is damaged, and its copy as well or not there.
    """
    silences, problem = _read(silences_path(published, cluster))
    if problem is not None:
        log.error("%s", problem)
    return silences


def _read(path: Path) -> tuple[list[Silence], str | None]:
    """What a file holds, or its copy; and what is wrong with the file then."""
    copy = path.with_name(COPY)
    try:
        return _file.decode(path.read_bytes()), None
    except FileNotFoundError:
        if not copy.exists():
            return [], None
        what = "is gone"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what = f"is damaged ({error})"
    try:
        silences = _file.decode(copy.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        raise msgspec.DecodeError(f"{path} {what}, and {COPY} cannot be read either") from None
    return silences, f"{path} {what}: its copy is read; the next silence mends it"


def add_silence(published: Path, asked: SilenceRequest, who: str, now: datetime) -> Silence:
    """Keep a silence.

    Args:
        published: The published folder.
        asked: As `decode_silence` gives it.
        who: Name of who asks.
        now: Present time, UTC.

    Raises:
        UnavailableError: There are too many, or the disk refused; it does not count as kept then.
    """
    assert asked.start is not None
    assert asked.end is not None
    silence = Silence(
        f"si-{secrets.token_hex(6)}", asked.cluster, asked.node, asked.bottleneck_class, asked.scope,
        asked.start, asked.end, asked.reason, who, now,
    )  # fmt: skip

    def change(kept: list[Silence]) -> list[Silence]:
        if len(kept) >= MAX_SILENCES:
            words = f"{MAX_SILENCES} silences of {asked.cluster} are kept: take back some, or silence more at once"
            raise UnavailableError("too_many", words)
        return [*kept, silence]

    _change(published, asked.cluster, now, change)
    return silence


def end_silence(published: Path, cluster: str, id_: str, now: datetime) -> Silence:
    """Take a silence back: it ends now, and what it covered until then stays covered.

    Raises:
        NotFoundError: There is none of that id.
        UnavailableError: The disk refused.
    """
    found: list[Silence] = []

    def change(kept: list[Silence]) -> list[Silence]:
        for i, silence in enumerate(kept):
            if silence.id == id_:
                if silence.ended_at is None and silence.end > now:
                    kept[i] = msgspec.structs.replace(silence, ended_at=now)
                found.append(kept[i])
        if not found:
            raise NotFoundError("unknown_silence", f"no silence {id_!r} of cluster {cluster!r}", {"id": id_})
        return kept

    _change(published, cluster, now, change)
    return found[0]


def _change(published: Path, cluster: str, now: datetime, change: Any) -> None:
    path = silences_path(published, cluster)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{FILE}.lock"), timeout=_LOCK_TIMEOUT_S):
            kept = [silence for silence in read_silences(published, cluster) if silence.until > now - KEPT]
            data = msgspec.json.encode(change(kept))
            write_atomically(path, data)
            write_atomically(path.with_name(COPY), data)
    except Timeout:
        raise UnavailableError("silences_busy", "silences are being written; try again") from None
    except (OSError, msgspec.DecodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise UnavailableError("silences_unwritable", f"silences of {cluster} cannot be kept: {said}") from None


class SilenceBook:
    """Silences as a long-running process reads them: anew when the file has changed.

    Args:
        published: The published folder.
        cluster: Name of the cluster.
    """

    def __init__(self, published: Path, cluster: str) -> None:
        self._published, self._cluster = published, cluster
        self._seen: tuple[int, int] | None = None
        self._silences: list[Silence] = []
        self.problem: str | None = None

    def active(self, now: datetime) -> list[Silence]:
        """Those that hold now. While the file cannot be read, those that it last had."""
        try:
            path = silences_path(self._published, self._cluster)
            about = path.stat() if path.exists() else None
            seen = (about.st_mtime_ns, about.st_ino) if about is not None else (0, 0)
            if seen != self._seen:
                (self._silences, self.problem), self._seen = _read(path), seen
        except (OSError, msgspec.DecodeError) as error:
            self.problem = f"silences cannot be read: {error}"
            self._seen = None
        return [silence for silence in self._silences if silence.is_active(now)]


def silenced(hints: Sequence[Bottleneck], silences: Iterable[Silence]) -> list[Bottleneck]:
    """The same hints; `silenced_by` names the first silence that covers one."""
    silences = list(silences)
    out = []
    for hint in hints:
        by = next((silence.id for silence in silences if silence.covers(hint)), None)
        out.append(hint if by == hint.silenced_by else msgspec.structs.replace(hint, silenced_by=by))
    return out
