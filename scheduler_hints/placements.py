"""What a scheduler has just placed and telemetry has not seen yet: such nodes are taken out of windows at once.

One file a cluster, `published/<cluster>/placements.json`, replaced atomically, so that every process that serves hints
sees the same. A placement counts for 90 s: by then the job shows in the queue, or it never came. Here belong the shape,
the file and what is left of a window; the route stands in `placement_routes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from filelock import FileLock, Timeout

from scheduler_hints.errors import UnavailableError, decode_body
from scheduler_hints.schema import Window
from scheduler_hints.shards import Row
from scheduler_hints.snapshot import boot_id, write_atomically

FILE = "placements.json"
LIFE_S = 90.0
MAX_PLACEMENTS, MAX_NODES, MAX_KEPT = 1_000, 20_000, 20_000
_LOCK_TIMEOUT_S = 5.0
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Placement(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A job and the nodes that it was put on."""

    job_id: _Name
    nodes: Annotated[list[_Name], msgspec.Meta(min_length=1, max_length=MAX_NODES)]


class PlacementRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Placements that were made just now, 1 to 1,000; a job that comes again moves."""

    cluster: _Name
    placements: Annotated[list[Placement], msgspec.Meta(min_length=1, max_length=MAX_PLACEMENTS)]


class PlacementsKept(msgspec.Struct, frozen=True):
    """How many were kept, and for how long they count, s."""

    kept: int
    cluster: str
    counts_for_s: float
    received_at: datetime


class InFlight(msgspec.Struct, frozen=True):
    """A placement that counts until `until_s` (CLOCK_BOOTTIME of the boot it was kept in)."""

    job_id: str
    nodes: list[str]
    until_s: float
    boot: str


_request = msgspec.json.Decoder(PlacementRequest)
_file = msgspec.json.Decoder(list[InFlight])


def decode_placements(body: bytes) -> PlacementRequest:
    """Decode and check a body.

    Raises:
        BadRequestError: It is not JSON.
        InvalidBodyError: It has the wrong shape; the message names the field.
    """
    return decode_body(_request, body, {"request": PlacementRequest, "placement": Placement})


def placements_path(published: Path, cluster: str) -> Path:
    """File of a cluster's placements under the published folder."""
    return published / cluster / FILE


def decode_in_flight(data: bytes) -> list[InFlight]:
    """What a file holds; of this boot.

    Raises:
        msgspec.DecodeError: It is damaged.
    """
    return [one for one in _file.decode(data) if one.boot == boot_id()]


def keep_placements(published: Path, request: PlacementRequest, now_s: float, now: datetime) -> PlacementsKept:
    """Keep placements; those that are over make room.

    Args:
        published: The published folder.
        request: What was asked, checked.
        now_s: Now on CLOCK_BOOTTIME, s.
        now: Present time, UTC.

    Raises:
        UnavailableError: Too many are in flight, or the disk refused; none counts as kept then.
    """
    path = placements_path(published, request.cluster)
    named = {placement.job_id for placement in request.placements}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{FILE}.lock"), timeout=_LOCK_TIMEOUT_S):
            try:
                before = decode_in_flight(path.read_bytes())
            except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
                before = []  # a damaged file holds nothing that outlives 90 s
            kept = [one for one in before if one.until_s > now_s and one.job_id not in named]
            kept += [InFlight(one.job_id, one.nodes, now_s + LIFE_S, boot_id()) for one in request.placements]
            if sum(len(one.nodes) for one in kept) > MAX_KEPT:
                words = f"more than {MAX_KEPT} nodes of {request.cluster} would be in flight: wait {LIFE_S:.0f} s"
                raise UnavailableError("too_many", words)
            write_atomically(path, msgspec.json.encode(kept), durable=False)
    except Timeout:
        raise UnavailableError("placements_busy", "placements are being written; try again") from None
    except OSError as error:
        words = f"placements of {request.cluster} cannot be kept: {error.strerror or error}"
        raise UnavailableError("placements_unwritable", words) from None
    return PlacementsKept(len(request.placements), request.cluster, LIFE_S, now)


def without(
    rows: Iterable[Row], taken: frozenset[str], needs: Callable[[str], tuple[int | None, int | None]]
) -> list[Row]:
    """Windows without nodes that are taken; those of which nothing is left are left out.

    Args:
        rows: Windows of one cluster.
        taken: Nodes in flight.
        needs: Nodes and GPUs that a job asks for; None: not known, and such a job does not fit what has shrunk.
    """
    out = []
    for row in rows:
        window: Window = row.item
        if taken.isdisjoint(window.nodes):
            out.append(row)
            continue
        nodes = [node for node in window.nodes if node not in taken]
        if not nodes:
            continue
        gpus = window.gpus * len(nodes) // len(window.nodes)
        fits = []
        for job in window.fits_jobs:
            wanted_nodes, wanted_gpus = needs(job)
            is_known = wanted_nodes is not None or wanted_gpus is not None
            if is_known and (wanted_nodes or 0) <= len(nodes) and (wanted_gpus or 0) <= gpus:
                fits.append(job)
        left = msgspec.structs.replace(window, nodes=nodes, gpus=gpus, fits_jobs=fits)
        out.append(Row(left, msgspec.json.encode(left), row.deadline_s))
    return out


def nodes_in_flight(placements: Iterable[InFlight], now_s: float) -> tuple[frozenset[str], float]:
    """Nodes of placements that still count, and until when all of them do; infinite where there are none."""
    living = [one for one in placements if one.until_s > now_s]
    until_s = min((one.until_s for one in living), default=float("inf"))
    return frozenset(node for one in living for node in one.nodes), until_s


def needs_of(jobs: Mapping[str, Row] | None) -> Callable[[str], tuple[int | None, int | None]]:
    """Looks up what jobs ask for in the published forecasts of jobs."""

    def look(job_id: str) -> tuple[int | None, int | None]:
        row: Any = jobs.get(job_id) if jobs is not None else None
        return (row.item.nodes, row.item.gpus) if row is not None else (None, None)

    return look
