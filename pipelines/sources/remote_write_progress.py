"""How far every sender of remote-write has come, and the small file that tells other processes.

Ingest reads a window once everything before its end has arrived. A sender that is silent is waited for, as it will send
what it could not send, unless others bring its series by now or it has been silent longer than it keeps things.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from pipelines.sources.remote_write_newest import Newest
from pipelines.sources.remote_write_series import Series

STATE_FILE = "remote-write.json"
_SILENT_MS = 120_000
_RESTORED_MS = 15 * 60_000  # a sender of an earlier run is waited for this long
_GONE_MS = 2 * 3_600_000  # Prometheus keeps about as much to send again
_SENDERS = 1000


class Sender(msgspec.Struct):
    """One address that sends.

    Attributes:
        number: Its number in this run, -1 while it was not heard in it.
        heard_ms: When it last sent something, ms since the epoch.
        complete_ms: Everything of it before this time has arrived; None: it brought nothing of use.
    """

    number: int
    heard_ms: int
    complete_ms: int | None = None


class IntakeState(msgspec.Struct):
    """What other processes may know: the content of the state file.

    Attributes:
        at_ms: When it was written, ms since the epoch.
        complete_ms: Everything before this time has arrived from every sender that is waited for; None: nothing has.
        newest_ms: Time of the newest sample.
        series: Series of use that are known.
        senders: By address.
        counts: Requests, samples taken, and what was left out, since the receiver started.
    """

    at_ms: int = 0
    complete_ms: int | None = None
    newest_ms: int | None = None
    series: int = 0
    senders: dict[str, Sender] = msgspec.field(default_factory=dict)
    counts: dict[str, int] = msgspec.field(default_factory=dict)


def read_state(folder: Path) -> IntakeState | None:
    """The state file of a spool folder; None when there is none that can be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
        return msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=IntakeState)
    return None


def write_state(folder: Path, state: IntakeState) -> None:
    """Write the state file, whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{STATE_FILE}.partial"
    partial.write_bytes(msgspec.json.encode(state))
    partial.replace(folder / STATE_FILE)


class Progress:
    """Senders of one receiver.

    Args:
        state: Where they stand; those of an earlier run are waited for.
        started_ms: When the receiver started.
    """

    def __init__(self, state: IntakeState, started_ms: int) -> None:
        self._state, self._started_ms, self._count = state, started_ms, 0
        for sender in state.senders.values():
            sender.number = -1

    def hear(self, address: str, now_ms: int) -> int:
        """That address has sent something; its number."""
        senders = self._state.senders
        sender = senders.get(address)
        if sender is None:
            if len(senders) >= _SENDERS:
                del senders[min(senders, key=lambda name: senders[name].heard_ms)]
            sender = senders[address] = Sender(-1, now_ms)
        if sender.number < 0:
            sender.number, self._count = self._count, self._count + 1
        sender.heard_ms = now_ms
        return sender.number

    def update(self, newest: Newest, series: Series, now_ms: int) -> None:
        """See anew how far each sender has come, and forget those that are gone."""
        senders = self._state.senders
        last_ms = max((sender.heard_ms for sender in senders.values()), default=0)
        talking = [s.number for s in senders.values() if s.number >= 0 and s.heard_ms >= last_ms - _SILENT_MS]
        for address, sender in list(senders.items()):
            if sender.number in talking:
                at_ms = newest.complete_ms(sender.number, sender.heard_ms)
                sender.complete_ms = sender.complete_ms if at_ms is None else at_ms
            elif sender.number < 0:
                if now_ms - self._started_ms > _RESTORED_MS:
                    del senders[address]
            elif last_ms - sender.heard_ms > _GONE_MS or newest.covered_ratio(series, sender.number, talking) > 0.5:
                del senders[address]
        times = [sender.complete_ms for sender in senders.values() if sender.complete_ms is not None]
        self._state.complete_ms = min(times, default=self._state.complete_ms)
