"""Tokens: hashed, limited, reloaded; and no open door by accident."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path

import pytest

from scheduler_hints.errors import ForbiddenError, UnauthorizedError
from scheduler_hints.tokens import (
    BindError,
    Principal,
    TokenError,
    TokenStore,
    check_bind,
    create_token,
    revoke_token,
)


def _header(secret: str) -> bytes:
    return f"Bearer {secret}".encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "tokens.json"


def test_a_token_says_who_asks(path: Path) -> None:
    secret = create_token(path, "slurm", "place", ["alpha"])
    other = create_token(path, "grafana", "read")
    store = TokenStore(path)
    assert store.authenticate(_header(secret)) == Principal("slurm", "place", ("alpha",))
    assert store.authenticate(b"bearer " + other.encode()) == Principal("grafana", "read", None)


def test_the_file_holds_no_secret_and_is_for_its_owner_alone(path: Path) -> None:
    secret = create_token(path, "slurm", "read")
    text = path.read_text()
    assert secret not in text
    assert secret.rsplit("_", 1)[1] not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(text)["tokens"][0]["name"] == "slurm"
    assert len(secret.split("_", 2)[2]) == 43  # 256 bits


@pytest.mark.parametrize("spoil", ["drop", "append", "case", "prefix", "id", "empty", "binary", "basic", "long"])
def test_anything_but_the_secret_is_refused(path: Path, spoil: str) -> None:
    secret = create_token(path, "slurm", "read")
    prefix, identity, rest = secret.split("_", 2)
    header = {
        "drop": _header(secret[:-1]),
        "append": _header(secret + "A"),
        "case": _header(secret.swapcase()),
        "prefix": _header(f"xx_{identity}_{rest}"),
        "id": _header(f"{prefix}_{'0' * 12}_{rest}"),
        "empty": b"Bearer ",
        "binary": b"Bearer \xff\xfe",
        "basic": b"Basic " + secret.encode(),
        "long": _header(secret + "A" * 10_000),
    }[spoil]
    with pytest.raises(UnauthorizedError):
        TokenStore(path).authenticate(header)


def test_no_header_is_a_401_that_says_what_is_needed(path: Path) -> None:
    create_token(path, "slurm", "read")
    with pytest.raises(UnauthorizedError, match="Authorization: Bearer"):
        TokenStore(path).authenticate(None)


def test_changes_take_effect_without_a_restart(path: Path) -> None:
    first = create_token(path, "first", "read")
    store = TokenStore(path)
    second = create_token(path, "second", "admin")
    with pytest.raises(UnauthorizedError):
        store.authenticate(_header(second))
    store.refresh()
    assert store.authenticate(_header(second)).role == "admin"
    revoke_token(path, "first")
    store.refresh()
    with pytest.raises(UnauthorizedError, match="revoked"):
        store.authenticate(_header(first))


def test_a_damaged_file_leaves_the_tokens_in_force_and_a_removed_one_revokes_them(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = create_token(path, "slurm", "read")
    store = TokenStore(path)
    path.write_text("{half")
    for _ in range(3):
        store.refresh()
    assert store.authenticate(_header(secret)).name == "slurm"
    assert len(caplog.records) == 1
    assert "stay in force" in caplog.text
    path.unlink()
    store.refresh()
    with pytest.raises(UnauthorizedError):
        store.authenticate(_header(secret))
    create_token(path, "slurm", "read")
    store.refresh()
    with pytest.raises(UnauthorizedError):
        store.authenticate(_header(secret))


@pytest.mark.parametrize(
    "name, role, clusters, words",
    [
        ("slurm", "root", None, "no role 'root'; roles: read, place, admin"),
        ("", "read", None, "1 to 64 printable"),
        ("a\nb", "read", None, "1 to 64 printable"),
        ("slurm", "read", [], "would see no cluster"),
        ("taken", "read", None, "already"),
    ],
)
def test_a_wrong_request_for_a_token_is_refused(
    path: Path, name: str, role: str, clusters: list[str] | None, words: str
) -> None:
    create_token(path, "taken", "read")
    before = path.read_bytes()
    with pytest.raises(TokenError, match=words):
        create_token(path, name, role, clusters)
    assert path.read_bytes() == before


def test_revoking_what_is_not_there_lists_what_is(path: Path) -> None:
    create_token(path, "slurm", "read")
    with pytest.raises(TokenError, match="no token named 'slurn'; tokens: slurm"):
        revoke_token(path, "slurn")


def test_a_file_that_is_none_is_refused_at_the_start(path: Path) -> None:
    with pytest.raises(TokenError, match="no such tokens file"):
        TokenStore(path)
    path.parent.mkdir()
    for text, words in (("[]", "not a tokens file"), ('{"version": 9, "tokens": []}', "version 9")):
        path.write_text(text)
        with pytest.raises(TokenError, match=words):
            TokenStore(path)


def test_tokens_made_at_once_are_all_kept(path: Path) -> None:
    threads = [threading.Thread(target=create_token, args=(path, f"t{n}", "read")) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(TokenStore(path)) == 8


def test_roles_include_the_lesser_ones() -> None:
    admin, place, read = (Principal("x", role, None) for role in ("admin", "place", "read"))
    for principal in (admin, place):
        principal.require("place")
    with pytest.raises(ForbiddenError, match="needs a token of role place; 'x' has role read"):
        read.require("place")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_tokens(host: str) -> None:
    check_bind(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "localhost.example.org"])
def test_any_other_address_needs_tokens_or_the_word(host: str, path: Path) -> None:
    with pytest.raises(
        BindError, match=r"no tokens file is configured\. Make a token \(`weatherglass token create NAME`\)"
    ):
        check_bind(host, None)
    check_bind(host, None, insecure=True)
    create_token(path, "slurm", "read")
    check_bind(host, TokenStore(path))
    revoke_token(path, "slurm")
    with pytest.raises(BindError, match="has no tokens"):
        check_bind(host, TokenStore(path))
