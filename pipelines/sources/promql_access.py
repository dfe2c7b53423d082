"""Who we are to a Prometheus and whom we trust: user, token, certificates, headers; and what to say when that fails.

Secrets are read from files, at every request, so that a token that is renewed on disk is used at once. They are never
part of a message. Requests themselves stand in `promql_session.py`.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

import requests
from requests.auth import AuthBase, HTTPBasicAuth

from pipelines.sources import SourceError

if TYPE_CHECKING:
    from pipelines.settings import Cluster

_MAX_SECRET_BYTES = 65_536
_NAMES = re.compile(r"(?:doesn't match|is not valid for|not match) '?([^'\"()]+)")


@dataclass(frozen=True)
class Access:
    """What a server wants before it answers. All empty: nothing.

    Attributes:
        username: User of basic authentication.
        password_file: File that holds the password.
        token_file: File that holds a bearer token.
        ca_file: Certificates (PEM) of the authorities to trust; empty: those of this host.
        cert_file: Our own certificate (PEM).
        key_file: Its key (PEM); empty: it stands in `cert_file`.
        headers: Sent with every request, as `X-Scope-OrgID`.
        password: Password that stood in the URL.
    """

    username: str = ""
    password_file: str = ""
    token_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    password: str = field(default="", repr=False)

    def files(self) -> Iterator[tuple[str, str]]:
        """Setting and path of each file that must be there."""
        for name in ("password_file", "token_file", "ca_file", "cert_file", "key_file"):
            if getattr(self, name):
                yield f"prometheus_{name}", getattr(self, name)

    def in_words(self) -> str:
        """Who was refused and what to look at, without a secret."""
        if self.token_file:
            return f"the token in {self.token_file} (prometheus_token_file); is it still valid, and for this server?"
        if self.password_file:
            return f"user {self.username!r} with the password in {self.password_file} (prometheus_password_file)"
        if self.username:
            return f"user {self.username!r} with the password in prometheus_url"
        return (
            "a request without a user: set prometheus_username and prometheus_password_file, or prometheus_token_file, "
            "or put user:password@ into prometheus_url"
        )

    def apply(self, session: requests.Session, source: str) -> None:
        """Set up a session that uses this access.

        Args:
            session: Gets headers, authentication and certificates.
            source: Name for messages.
        """
        session.headers.update(self.headers)
        session.auth = _Auth(self, source)
        session.verify = self.ca_file or True
        if self.cert_file:
            session.cert = (self.cert_file, self.key_file) if self.key_file else self.cert_file

    def check_files(self, source: str) -> None:
        """Read nothing yet, but see that every file is there and can be read.

        Raises:
            SourceError: Names the setting and the file.
        """
        for setting, path in self.files():
            _read(source, setting, path)


class _Auth(AuthBase):
    """Reads the secret anew for each request. Being set at all, it keeps `~/.netrc` out of it."""

    def __init__(self, access: Access, source: str) -> None:
        self._access, self._source = access, source

    def __call__(self, r: requests.PreparedRequest) -> requests.PreparedRequest:
        access = self._access
        if access.token_file:
            token = _read(self._source, "prometheus_token_file", access.token_file)
            r.headers["Authorization"] = f"Bearer {token}"
        elif access.username:
            password = access.password
            if access.password_file:
                password = _read(self._source, "prometheus_password_file", access.password_file)
            return HTTPBasicAuth(access.username.encode(), password.encode())(r)
        return r


def _read(source: str, setting: str, path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MAX_SECRET_BYTES).decode("utf-8").strip()
    except OSError as error:
        raise SourceError(f"{source}: {setting} = {path!r}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SourceError(f"{source}: {setting} = {path!r}: is no text file") from None
    if not text:
        raise SourceError(f"{source}: {setting} = {path!r}: is empty")
    if setting in ("prometheus_token_file", "prometheus_password_file") and not text.isprintable():
        raise SourceError(f"{source}: {setting} = {path!r}: must hold one line")
    return text


def access_of(cluster: Cluster) -> Access:
    """What a cluster's settings say about access; user and password in its URL count where the settings are empty."""
    _, username, password = without_password(cluster.prometheus_url)
    is_in_url = not (cluster.prometheus_username or cluster.prometheus_token_file)
    return Access(
        username=username if is_in_url else cluster.prometheus_username,
        password_file=cluster.prometheus_password_file,
        token_file=cluster.prometheus_token_file,
        ca_file=cluster.prometheus_ca_file,
        cert_file=cluster.prometheus_cert_file,
        key_file=cluster.prometheus_key_file,
        headers=dict(cluster.prometheus_headers),
        password=password if is_in_url else "",
    )


def without_password(url: str) -> tuple[str, str, str]:
    """A URL without its user part, the user and the password."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    name, _, password = user.partition(":") if at else ("", "", "")
    return urlunsplit(parts._replace(netloc=host)), unquote(name), unquote(password)


def explain_tls(error: BaseException, access: Access, url: str) -> str:
    """What went wrong before the first byte of HTTP, and what to set."""
    text = _ssl_text(error)
    host = urlsplit(url).hostname or url
    if "hostname mismatch" in text.lower() or "doesn't match" in text or "not valid for" in text:
        names = _NAMES.search(text)
        said = f" ({names[0].strip()})" if names else ""
        return f"its certificate is for another name than {host!r}{said}: put a name that it holds into prometheus_url"
    if "expired" in text:
        return "its certificate has expired: renew it on the server (and compare both clocks)"
    if "not yet valid" in text:
        return "its certificate is not valid yet: compare both clocks"
    if "certificate verify failed" in text.lower():
        trusted = f"the authorities in {access.ca_file}" if access.ca_file else "the authorities this host trusts"
        return (
            f"its certificate was not signed by {trusted} ({text}): set prometheus_ca_file to the certificate of the "
            "authority that signed it"
        )
    if "certificate required" in text or "handshake failure" in text or "bad certificate" in text:
        ours = f"refused {access.cert_file}" if access.cert_file else "was shown none"
        return f"it asks for a client certificate: set prometheus_cert_file and prometheus_key_file; it {ours}"
    if "eof occurred" in text.lower():
        return f"it hung up before an answer; {hung_up(access)}"
    if "wrong version number" in text.lower() or "record layer failure" in text.lower():
        return "it does not speak TLS: is it http:// instead of https:// in prometheus_url?"
    return f"TLS failed: {text}"


def hung_up(access: Access) -> str:
    """What a server may have wanted that ends a TLS connection without a word."""
    if access.cert_file:
        return f"does it accept {access.cert_file} (prometheus_cert_file)?"
    return "if it asks for a client certificate: set prometheus_cert_file and prometheus_key_file"


def explain_files(error: BaseException, access: Access) -> str | None:
    """Which of the certificate files is no good; None when they are not to blame."""
    inner: BaseException | None = error
    while inner is not None:
        text = str(inner)
        if isinstance(inner, OSError) and not isinstance(inner, requests.RequestException):
            if access.ca_file and ("NO_CERTIFICATE_OR_CRL" in text or "no certificate or crl" in text):
                return f"prometheus_ca_file = {access.ca_file!r}: holds no certificate in PEM form"
            if access.cert_file and isinstance(inner, ssl.SSLError) and "[SSL] PEM lib" in text:
                return f"prometheus_cert_file = {access.cert_file!r}: holds no certificate and key in PEM form"
            if access.cert_file and "KEY_VALUES_MISMATCH" in text:
                return f"prometheus_key_file = {access.key_file!r}: is not the key of {access.cert_file!r}"
        inner = inner.__cause__ or inner.__context__
    return None


def _ssl_text(error: BaseException) -> str:
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, ssl.SSLError):
            text = getattr(inner, "verify_message", "") or inner.reason or str(inner)
            prefix = "certificate verify failed: " if isinstance(inner, ssl.SSLCertVerificationError) else ""
            return f"{prefix}{text}".replace("_", " ").lower() if inner.reason == text else f"{prefix}{text}"
        reason = getattr(inner, "reason", None)
        inner = reason if isinstance(reason, BaseException) else inner.__cause__ or inner.__context__
    return str(error)
