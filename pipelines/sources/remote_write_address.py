"""Where a receiver of remote-write listens, and the token and certificate it asks senders with. It starts nothing."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.settings_files import FileFaultError, KeyFaultError, check_pair, read_secret
from pipelines.sources import SourceError
from scheduler_hints.tokens import is_loopback

if TYPE_CHECKING:
    from pipelines.settings import Cluster

FilesState = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True)
class Address:
    """Where a receiver listens and what it asks of senders.

    Attributes:
        cluster: Name of the cluster, for messages.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        token_file: File with the bearer token of senders; needed on any address but loopback. Empty: none.
        cert_file: PEM of its certificate; empty: plain http.
        key_file: PEM of the certificate's key; empty: it stands in `cert_file`.
    """

    cluster: str
    host: str = "127.0.0.1"
    port: int = 8704
    token_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def setting(self, name: str) -> str:
        """The full name of a setting of the receiver."""
        return f"clusters.{self.cluster}.remote_write_{name}"

    def base_url(self, port: int | None = None) -> str:
        """How a process of this host reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        scheme = "https" if self.cert_file else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port or self.port}"

    def read_token(self) -> str:
        """The bearer token of senders; empty when none is asked for.

        Raises:
            SourceError: It cannot be read, is none, or is needed and not given.
        """
        if not self.token_file:
            if not is_loopback(self.host):
                raise SourceError(
                    f"{self.cluster}: set {self.setting('token_file')}: who listens on {self.host} must ask senders "
                    "for a token"
                )
            return ""
        try:
            return read_secret(self.token_file, is_token=True)
        except FileFaultError as fault:
            raise SourceError(f"{self.cluster}: {self.setting('token_file')} = {self.token_file!r}: {fault}") from None

    def check_certificate(self) -> None:
        """See that certificate and key can be used.

        Raises:
            SourceError: They cannot.
        """
        if not self.cert_file:
            return
        try:
            check_pair(self.cert_file, self.key_file)
        except KeyFaultError as fault:
            raise SourceError(f"{self.cluster}: {self.setting('key_file')} = {self.key_file!r}: {fault}") from None
        except FileFaultError as fault:
            raise SourceError(f"{self.cluster}: {self.setting('cert_file')} = {self.cert_file!r}: {fault}") from None

    def files_state(self) -> FilesState:
        """What tells that one of the files has changed."""
        return tuple(_file_state(path) for path in (self.token_file, self.cert_file, self.key_file))


def address_of(name: str, cluster: Cluster) -> Address:
    """The address that a cluster's settings ask for."""
    return Address(
        name,
        cluster.remote_write_host,
        cluster.remote_write_port,
        cluster.remote_write_token_file,
        cluster.remote_write_cert_file,
        cluster.remote_write_key_file,
    )


def _file_state(path: str) -> tuple[int, int, int] | None:
    with contextlib.suppress(OSError):
        found = Path(path).stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None
