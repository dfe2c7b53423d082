"""What settings point at: secrets, certificates, files, folders, and ports of one host. Looked at, never changed.

Each kind of file has one judge here, and each setting that names a file stands in one of the tables below; a test
keeps them complete. The readers serve those who use the files too, so that a check and a start say the same.
"""

from __future__ import annotations

import glob
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipelines.settings_reading import Problem

if TYPE_CHECKING:
    from pipelines.settings import Cluster, Settings

SECRETS = ("prometheus_password_file", "prometheus_token_file", "slurm_rest_token_file", "remote_write_token_file")
AUTHORITIES = ("prometheus_ca_file",)
PAIRS = ("prometheus", "remote_write")  # …_cert_file and …_key_file
READ = ("telemetry_path", "jobs_path", "slurm_ctld_log", "slurm_conf")
ELSEWHERE = ("slurm_bin", "inventory")
_SLURM_TOOLS = ("scontrol", "squeue", "sacct")
_MOST_SECRET_BYTES = 65_536
_EVERYWHERE = {"0.0.0.0", "::", ""}


class FileFaultError(Exception):
    """A file is not what its setting wants; the message says what is wrong with it, without naming either."""


class KeyFaultError(FileFaultError):
    """The same, of the key that belongs to a certificate."""


def _content(path: str, most_bytes: int) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(most_bytes)
    except OSError as error:
        raise FileFaultError(f"{error.strerror}: it must be a file that this user can read") from None


def read_secret(path: str, *, is_token: bool) -> str:
    """The secret in a file.

    Args:
        path: The file: one line.
        is_token: It is a token that goes into a header, alone or as `scontrol token` prints it; else a password.

    Raises:
        FileFaultError: It is away, empty, or holds what cannot be one. The secret is not part of the message.
    """
    raw = _content(path, _MOST_SECRET_BYTES + 1)
    what = "the token" if is_token else "the password"
    wanted = f"it must hold {what} alone, on one line"
    if len(raw) > _MOST_SECRET_BYTES:
        raise FileFaultError(f"is larger than {_MOST_SECRET_BYTES >> 10} KiB: {wanted}")
    try:
        text = raw.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise FileFaultError(f"is no text file: {wanted}") from None
    if not text:
        raise FileFaultError(f"is empty: {wanted}")
    if len(lines := text.splitlines()) > 1:
        raise FileFaultError(f"has {len(lines)} lines: {wanted}")
    if not text.isprintable():
        raise FileFaultError(f"holds a character that cannot be printed: {wanted}")
    if not is_token:
        return text
    if text.lower().startswith("bearer "):
        raise FileFaultError(f"begins with the word {text[:6]!r}: {wanted}")
    text = text.removeprefix("SLURM_JWT=")
    if not text or not text.isascii() or " " in text:
        raise FileFaultError(f"holds what no header can carry (a blank, a letter beyond ASCII): {wanted}")
    return text


def check_authorities(path: str) -> None:
    """See that a file holds certificates in PEM form.

    Raises:
        FileFaultError: It does not.
    """
    _content(path, 1)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError):
        raise FileFaultError("holds no certificate in PEM form (-----BEGIN CERTIFICATE-----)") from None


def check_pair(cert: str, key: str) -> None:
    """See that a certificate and its key fit.

    Args:
        cert: PEM of the certificate.
        key: PEM of the key; empty: it stands in `cert`.

    Raises:
        FileFaultError: The certificate is none, or it should hold the key and does not.
        KeyFaultError: The key is none, is locked, or is another's.
    """
    check_authorities(cert)
    asked: list[bool] = []

    def passphrase() -> str:
        asked.append(True)
        return ""

    fault = KeyFaultError if key else FileFaultError
    try:
        _content(key or cert, 1)
    except FileFaultError as error:
        raise fault(str(error)) from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key or None, password=passphrase)
    except (ssl.SSLError, OSError) as error:
        if asked:
            raise fault("is locked with a passphrase: a key without one is needed") from None
        if "KEY_VALUES_MISMATCH" in str(error):
            raise fault(f"is not the key of {cert!r}" if key else "holds a key of another certificate") from None
        hint = "" if key else "; set the key's file beside it, or put the key into this one"
        raise fault(f"holds no private key in PEM form (-----BEGIN PRIVATE KEY-----){hint}") from None


def broken_files(settings: Settings) -> Iterator[Problem]:
    """Every file and folder that a setting names and that cannot serve."""
    for name, cluster in settings.clusters.items():
        for setting, text in _of_cluster(cluster):
            yield ("clusters", name, setting), f"{getattr(cluster, setting)!r}: {text}"
    yield from _of_tokens(settings.api.tokens_file)
    if fault := _open_api(settings):
        yield ("api", "host"), f"{settings.api.host!r}: {fault}"
    yield from _places(settings)


def _of_cluster(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Setting and what is wrong with what it names."""
    for setting in SECRETS:
        if path := getattr(cluster, setting):
            try:
                read_secret(path, is_token="token" in setting)
            except FileFaultError as fault:
                yield setting, str(fault)
    for setting in AUTHORITIES:
        if path := getattr(cluster, setting):
            try:
                check_authorities(path)
            except FileFaultError as fault:
                yield setting, str(fault)
    for part in PAIRS:
        cert, key = getattr(cluster, f"{part}_cert_file"), getattr(cluster, f"{part}_key_file")
        try:
            if cert:
                check_pair(cert, key)
        except KeyFaultError as fault:
            yield f"{part}_key_file", str(fault)
        except FileFaultError as fault:
            yield f"{part}_cert_file", str(fault)
    for setting in READ:
        if (path := getattr(cluster, setting)) and (fault := _unreadable(path, may_be_many=setting.endswith("_path"))):
            yield setting, fault
    if cluster.slurm_bin and not cluster.slurm_rest_url and (fault := _no_tools(cluster.slurm_bin)):
        yield "slurm_bin", fault
    if cluster.inventory:
        from pipelines.sources import SourceError
        from pipelines.sources.inventory import read_inventory

        try:
            read_inventory(cluster.inventory)
        except SourceError as error:
            yield "inventory", str(error).removeprefix(f"inventory {cluster.inventory}: ")


def _unreadable(path: str, *, may_be_many: bool) -> str:
    place = Path(path)
    if may_be_many and (place.is_dir() or (glob.has_magic(place.name) and any(place.parent.glob(place.name)))):
        return ""
    try:
        _content(path, 1)
    except FileFaultError as fault:
        return str(fault)
    return ""


def _no_tools(folder: str) -> str:
    if not Path(folder).is_dir():
        return f"no such folder: it must hold {', '.join(_SLURM_TOOLS)}; empty: they are found on PATH"
    lacking = [tool for tool in _SLURM_TOOLS if not os.access(Path(folder) / tool, os.X_OK)]
    return f"lacks {', '.join(lacking)}, or this user may not run them" if lacking else ""


def _open_api(settings: Settings) -> str:
    from scheduler_hints.tokens import is_loopback

    if settings.api.tokens_file or settings.api.insecure or is_loopback(settings.api.host):
        return ""
    return (
        "is open to others, so they must give a token: set api.tokens_file and make some with `weatherglass token "
        "create NAME`, or set api.insecure = true"
    )


def _of_tokens(path: str) -> Iterator[Problem]:
    if not path:
        return
    from scheduler_hints.tokens import TokenError, read_tokens

    where = ("api", "tokens_file")
    try:
        read_tokens(Path(path))
    except FileNotFoundError:
        yield where, f"{path!r}: no such file: make it with `weatherglass token create NAME`"
    except TokenError as error:
        yield where, f"{path!r}: {str(error).removeprefix(f'{path}: ')}"


def _places(settings: Settings) -> Iterator[Problem]:
    """Folders and the catalogue that are written to: what is in the way, and where this user may not write."""
    kind, _, address = settings.store_url.partition(":")
    folders = [(("state_dir",), settings.state_dir)]
    if "{state_dir}" not in settings.store.data_path and "://" not in settings.store.data_path:
        folders.append((("store", "data_path"), settings.store.data_path))
    for location, path in folders:
        if fault := _no_folder(Path(path)):
            yield location, f"{path!r}: {fault}"
    if kind == "sqlite" and "{state_dir}" not in settings.store.url:
        if Path(address).is_dir():
            yield ("store", "url"), f"{settings.store.url!r}: {address} is a folder: name a file in it"
        elif fault := _no_folder(Path(address).parent):
            yield ("store", "url"), f"{settings.store.url!r}: {fault}"


def _no_folder(path: Path) -> str:
    """Why there can be no folder to write in; empty: there can."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return f"{there} is in the way: it is no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"this user may not write in {there}"
    return ""


class Listener(NamedTuple):
    """A place where a part of Weatherglass listens: setting, address and port."""

    location: tuple[str, ...]
    host: str
    port: int

    @property
    def setting(self) -> str:
        return ".".join(self.location)

    def meets(self, other: Listener) -> bool:
        """Both cannot listen on one host."""
        mine, theirs = ("127.0.0.1" if host == "localhost" else host for host in (self.host, other.host))
        return self.port == other.port and (mine == theirs or bool(_EVERYWHERE & {mine, theirs}))


def listeners(settings: Settings) -> list[Listener]:
    """Every place where a part of Weatherglass listens when all of them run on one host."""
    found = [
        Listener(("api", "port"), settings.api.host, settings.api.port),
        Listener(("dashboards", "port"), settings.dashboards.host, settings.dashboards.port),
    ]
    if settings.dagster.enabled:
        found.append(Listener(("dagster", "port"), settings.dagster.host, settings.dagster.port))
    for name, cluster in settings.clusters.items():
        if cluster.telemetry == "remote-write":
            location = ("clusters", name, "remote_write_port")
            found.append(Listener(location, cluster.remote_write_host, cluster.remote_write_port))
    return found


def port_conflicts(settings: Settings) -> Iterator[Problem]:
    """Ports that two parts want on one host: each later one, with those that are taken."""
    known: list[Listener] = []
    for one in listeners(settings):
        other = next((other for other in known if one.meets(other)), None)
        if other is not None:
            taken = ", ".join(f"{each.port} ({each.setting})" for each in known)
            yield one.location, f"{one.port}: {other.setting} has it already; choose another, not {taken}"
        known.append(one)
