"""Keeps the receiver of remote-write up: starts it, starts it again when it has ended, takes up renewed secrets.

What it could not do it says in a small file beside the sample log, for the processes that do not listen; the file also
holds a number by which they know their own receiver from a stranger on its port. What is received is not looked at.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipelines.sources import SourceError
from pipelines.sources.remote_write_address import Address, FilesState

if TYPE_CHECKING:
    from pipelines.sources.remote_write_intake import Intake
    from pipelines.sources.remote_write_server import Receiver

log = logging.getLogger(__name__)

RECEIVER_FILE = "receiver.json"
_WRITE_EVERY_S = 30.0


class ReceiverState(msgspec.Struct):
    """What other processes may know of the receiver: the content of `receiver.json`.

    Attributes:
        at_ms: When it was written, ms since the epoch.
        host: Name of the machine.
        pid: Of the process.
        port: Where it listens, or should.
        instance: Number that the receiver gives at `/-/ready`; empty: it does not listen.
        problem: Why it does not listen, or what it could not take up; None: all is well.
    """

    at_ms: int
    host: str
    pid: int
    port: int
    instance: str = ""
    problem: str | None = None

    def is_fresh(self, now_s: float) -> bool:
        """A process keeps it up to date."""
        return now_s - self.at_ms / 1000 < 4 * _WRITE_EVERY_S


def read_receiver(folder: Path) -> ReceiverState | None:
    """What the process that listens last said of it; None: nothing that can be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
        return msgspec.json.decode((folder / RECEIVER_FILE).read_bytes(), type=ReceiverState)
    return None


class Keeper:
    """The intake of a cluster and the receiver that feeds it. Not for several threads at once.

    Args:
        address: Where to listen.
        folder: Where it says how it does.
        make_intake: Makes what takes bodies in.
        most_bytes: Largest body, as sent.
        period_s: How often `intake` is called, s; for messages.
    """

    def __init__(
        self, address: Address, folder: Path, make_intake: Callable[[], Intake], *, most_bytes: int, period_s: float
    ) -> None:
        self.address, self.port = address, address.port
        self.problem: str | None = None
        self.started_s = 0.0
        self._folder, self._make_intake = folder, make_intake
        self._most_bytes, self._period_s = most_bytes, period_s
        self._intake: Intake | None = None
        self._receiver: Receiver | None = None
        self._last = ""  # number of the last receiver
        self._files = address.files_state()
        self._down_at: datetime | None = None
        self._written_s = -_WRITE_EVERY_S

    @property
    def is_listening(self) -> bool:
        """Senders are answered."""
        return self._receiver is not None and self._receiver.is_running()

    @property
    def counts(self) -> dict[str, int]:
        """What the intake has counted; empty before there is one."""
        return {} if self._intake is None else dict(self._intake.state.counts)

    def intake(self) -> Intake:
        """What takes bodies in, behind a receiver that listens; it is started where it does not.

        Raises:
            SourceError: It cannot listen; the next call tries again.
        """
        try:
            found = self._listening()
        except SourceError as error:
            self._fail(str(error).removeprefix(f"{self.address.cluster}: "))
            raise SourceError(f"{self.address.cluster}: {self.problem}") from None
        if self._down_at is not None:
            self._down_at = None
        self._say()
        return found

    def _listening(self) -> Intake:
        if self._intake is not None and not self._intake.is_running():
            log.error("%s: the intake of remote-write has ended; it is started again", self.address.cluster)
            self._stop()
        if self._receiver is not None and not self._receiver.is_running():
            log.error("%s: the receiver of remote-write has ended; it is started again", self.address.cluster)
            self._stop_receiver()
        if self._receiver is not None and (files := self.address.files_state()) != self._files:
            self._renew(files)
        if self._receiver is None or self._intake is None:
            return self._start()
        return self._intake

    def _start(self) -> Intake:
        from pipelines.sources.remote_write_server import Receiver, ServerError, listen

        files, token = self.address.files_state(), self.address.read_token()
        self.address.check_certificate()
        try:
            listener = listen(self.address.host, self.port)
        except ServerError as error:
            raise SourceError(self._refusal(error)) from None
        try:
            intake = self._intake or self._make_intake()
            self._receiver = Receiver(
                listener,
                intake.submit,
                token=token,
                most_bytes=self._most_bytes,
                cert_file=self.address.cert_file,
                key_file=self.address.key_file,
                put_off=intake.put_off,
            )
        except ServerError as error:
            raise SourceError(str(error)) from None
        except BaseException:
            listener.close()
            raise
        if self._intake is None:
            intake.start()
        self._intake, self._files = intake, files
        self.port, self.started_s, self.problem = self._receiver.port, time.time(), None
        self._last, self._written_s = self._receiver.instance, -_WRITE_EVERY_S
        log.info(
            "%s: the receiver of remote-write listens on %s", self.address.cluster, self.address.base_url(self.port)
        )
        return intake

    def _renew(self, files: FilesState) -> None:
        """Take up a token or certificate that has changed on the disk; a broken one leaves the receiver as it is."""
        try:
            self.address.read_token()
            self.address.check_certificate()
        except SourceError as error:
            said = str(error).removeprefix(f"{self.address.cluster}: ")
            problem = f"{said}; the receiver goes on with what stood there before"
            if problem != self.problem:
                log.warning("%s: %s", self.address.cluster, problem)
                self.problem, self._written_s = problem, -_WRITE_EVERY_S
            return
        log.info("%s: token or certificate has changed: the receiver starts anew", self.address.cluster)
        self.problem, self._files = None, files
        self._stop_receiver()

    def _refusal(self, error: BaseException) -> str:
        """Why it cannot listen, and what to do."""
        cause, text = error.__context__, str(error)
        number = cause.errno if isinstance(cause, OSError) else None
        if number is not None and number in errno.errorcode:
            text = f"cannot listen on {self.address.host}:{self.port}: {os.strerror(number)}"
        if number == errno.EADDRINUSE:
            return f"{text}: stop what listens there, or set {self.address.setting('port')}"
        if number == errno.EACCES:
            return f"{text}: set {self.address.setting('port')} to one above 1023"
        return f"{text}: set {self.address.setting('host')} to an address of this machine"

    def _fail(self, reason: str) -> None:
        if self._down_at is None:
            self._down_at, self._written_s = datetime.now(UTC), -_WRITE_EVERY_S
        since = f"{self._down_at:%Y-%m-%d %H:%M} UTC"
        self.problem = (
            f"no samples are received since {since}: {reason}; tried again every {self._period_s:g} s, and senders "
            "keep what they could not send for about two hours"
        )
        self._say()

    def _say(self) -> None:
        """Write the file, now and then and after a change."""
        if time.monotonic() - self._written_s < _WRITE_EVERY_S:
            return
        self._written_s = time.monotonic()
        instance = "" if self._receiver is None else self._receiver.instance
        other = read_receiver(self._folder)
        if (
            not instance
            and other is not None
            and other.instance not in ("", self._last)
            and other.is_fresh(time.time())
        ):
            return  # another nowcast of this cluster holds the port: what it says stands
        now_ms = round(time.time() * 1000)
        state = ReceiverState(now_ms, socket.gethostname(), os.getpid(), self.port, instance, self.problem)
        with contextlib.suppress(OSError):  # a full disk shows elsewhere
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = self._folder / f"{RECEIVER_FILE}.{secrets.token_hex(4)}.partial"
            partial.write_bytes(msgspec.json.encode(state))
            partial.replace(self._folder / RECEIVER_FILE)

    def _stop_receiver(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def _stop(self) -> None:
        self._stop_receiver()
        if self._intake is not None:
            self._intake.close()
        self._intake = None

    def close(self) -> None:
        """Answer what has come, stop listening, close the log."""
        was_listening = self._receiver is not None
        self._stop()
        if was_listening:
            self._written_s = -_WRITE_EVERY_S
            self.problem = None
            self._say()
