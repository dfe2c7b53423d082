"""Bearer tokens: who may ask, in which role, about which clusters; and where the API may listen without them.

The file holds a salted SHA-256 of each secret, never the secret. A slow hash (scrypt, Argon2) protects passwords that
people choose; these secrets are 256 random bits that nobody can guess at any speed, and each request pays for the hash.

    {"version": 1, "tokens": [{"id", "name", "role", "clusters": null | [...], "salt", "hash", "created_at"}]}
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

import msgspec
from filelock import FileLock

from scheduler_hints.errors import ForbiddenError, UnauthorizedError
from scheduler_hints.snapshot import write_atomically

log = logging.getLogger(__name__)

Role = Literal["read", "place", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
PREFIX = "wg"
MAX_HEADER_BYTES = 512


class TokenError(Exception):
    """A tokens file or a request for a token is wrong; the message says what is."""


class BindError(Exception):
    """The API may not listen on that address like this; the message says what to do."""


class Token(msgspec.Struct, frozen=True):
    """One line of the tokens file."""

    id: str
    name: str
    role: Role
    clusters: tuple[str, ...] | None
    salt: str
    hash: str
    created_at: datetime


class _File(msgspec.Struct):
    version: int
    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. `clusters` None: all of them."""

    name: str
    role: Role
    clusters: tuple[str, ...] | None

    def require(self, role: Role) -> None:
        """Raise `ForbiddenError` unless this principal's role includes `role` (admin ⊃ place ⊃ read)."""
        if ROLES.index(self.role) < ROLES.index(role):
            raise ForbiddenError("wrong_role", f"this needs a token of role {role}; {self.name!r} has role {self.role}")


ANYONE = Principal("anyone", "admin", None)
"""Who asks where no tokens are needed."""


def _digest(salt: str, secret: str) -> str:
    return hashlib.sha256(f"{salt}:{secret}".encode()).hexdigest()


_NO_TOKEN = Token("", "", "read", (), "-" * 32, _digest("-" * 32, secrets.token_hex()), datetime.now(UTC))


def read_tokens(path: Path) -> list[Token]:
    """Tokens of a file.

    Raises:
        FileNotFoundError: It is not there.
        TokenError: It cannot be read or is not a tokens file.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TokenError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TokenError(f"{path}: not a tokens file: {error}") from error
    if file.version != 1:
        raise TokenError(f"{path}: version {file.version}, this program reads 1")
    return file.tokens


def _change(path: Path, tokens: list[Token]) -> None:
    write_atomically(path, msgspec.json.format(msgspec.json.encode(_File(1, tokens)), indent=2), mode=0o600)


def _lock(path: Path) -> FileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path.with_name(path.name + ".lock"), timeout=10)


def create_token(path: Path, name: str, role: str, clusters: Sequence[str] | None = None) -> str:
    """Add a token to a tokens file, which is made when it is missing.

    Args:
        path: Tokens file.
        name: Whose token it is; one name has one token.
        role: `read`, `place` or `admin`.
        clusters: Clusters it may see; None for all.

    Returns:
        The secret. It is shown once and stored nowhere.

    Raises:
        TokenError: The role is unknown, the name is taken or empty, or the file is not a tokens file.
    """
    if role not in ROLES:
        raise TokenError(f"no role {role!r}; roles: {', '.join(ROLES)}")
    if not name or not name.isprintable() or len(name) > 64:
        raise TokenError(f"token name {name!r}: 1 to 64 printable characters")
    if clusters is not None and not clusters:
        raise TokenError(f"token {name!r} would see no cluster; name some, or none at all for every cluster")
    identity, salt = secrets.token_hex(6), secrets.token_hex(16)
    secret = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
    token = Token(
        id=identity,
        name=name,
        role=role,
        clusters=None if clusters is None else tuple(clusters),
        salt=salt,
        hash=_digest(salt, secret),
        created_at=datetime.now(UTC).replace(microsecond=0),
    )
    with _lock(path):
        tokens = read_tokens(path) if path.exists() else []
        if any(known.name == name for known in tokens):
            raise TokenError(f"{path}: there is a token named {name!r} already; revoke it first or take another name")
        _change(path, [*tokens, token])
    return f"{PREFIX}_{identity}_{secret}"


def revoke_token(path: Path, name: str) -> None:
    """Remove a token from a tokens file; a running API refuses it within a second.

    Raises:
        TokenError: There is none of that name; the message lists those there are.
    """
    with _lock(path):
        tokens = read_tokens(path) if path.exists() else []
        kept = [token for token in tokens if token.name != name]
        if len(kept) == len(tokens):
            names = ", ".join(token.name for token in tokens) or "none"
            raise TokenError(f"{path}: no token named {name!r}; tokens: {names}")
        _change(path, kept)


class TokenStore:
    """The tokens of one file, read again when it changes.

    A file that becomes unreadable leaves the last good tokens in force (and is logged); one that is removed revokes
    them all.

    Raises:
        TokenError: The file is not there or not a tokens file when the store is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._by_id: dict[str, Token] = {}
        self._seen: tuple[int, ...] | None = ()
        self._logged = ""
        try:
            self._by_id = {token.id: token for token in read_tokens(path)}
        except FileNotFoundError:
            raise TokenError(f"{path}: no such tokens file; make one with `weatherglass token create NAME`") from None

    def __len__(self) -> int:
        return len(self._by_id)

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        try:
            status = self.path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
            if seen == self._seen:
                return
            self._by_id = {token.id: token for token in read_tokens(self.path)}
            self._seen = seen
            self._logged = ""
        except FileNotFoundError:
            self._by_id = {}
            self._seen = None
            self._log_once(f"{self.path}: the tokens file has gone: every token is refused")
        except (TokenError, OSError) as error:
            self._log_once(f"{error}; the tokens read before stay in force")

    def _log_once(self, message: str) -> None:
        if message != self._logged:
            self._logged = message
            log.error("%s", message)

    def authenticate(self, authorization: bytes | None) -> Principal:
        """Who sent this `Authorization` header.

        Raises:
            UnauthorizedError: There is none, or its token is not known.
        """
        if authorization is None:
            raise UnauthorizedError("no_token", "this API needs `Authorization: Bearer <token>`")
        scheme, _, value = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or len(authorization) > MAX_HEADER_BYTES or not authorization.isascii():
            raise UnauthorizedError("bad_token", "the Authorization header must be `Bearer <token>`")
        prefix, _, rest = value.decode("ascii").strip().partition("_")
        identity, _, secret = rest.partition("_")
        token = self._by_id.get(identity, _NO_TOKEN)
        is_right = hmac.compare_digest(_digest(token.salt, secret), token.hash)
        if not is_right or token is _NO_TOKEN or prefix != PREFIX:
            raise UnauthorizedError("bad_token", "this token is not known; it may have been revoked")
        return Principal(token.name, token.role, token.clusters)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(host: str, tokens: TokenStore | None, insecure: bool = False) -> None:
    """Refuse to listen where others can reach the API and nobody is asked who they are.

    Args:
        host: Address to listen on.
        tokens: Tokens in force, or None.
        insecure: The operator has said that it is meant.

    Raises:
        BindError: It is not loopback, there are no tokens, and `insecure` is not set.
    """
    if is_loopback(host) or insecure or (tokens is not None and len(tokens) > 0):
        return
    lack = "no tokens file is configured" if tokens is None else f"{tokens.path} has no tokens"
    raise BindError(
        f"will not listen on {host}: others can reach it and {lack}. Make a token (`weatherglass token create NAME`) "
        "and set [api] tokens_file, or listen on 127.0.0.1, or say --insecure if the network itself is trusted"
    )
