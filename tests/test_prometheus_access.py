"""User, token, certificates and headers of a Prometheus: on a real one behind TLS and basic authentication."""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipelines.settings import Cluster, SettingsError, parse_settings
from pipelines.sources import SourceError, build_telemetry
from tests.metric_services import (
    PASSWORD,
    USER,
    SecurePrometheus,
    make_authority,
    make_certificate,
)
from tests.services import Pages
from weatherglass import cli

pytestmark = pytest.mark.services("prometheus", "promtool", "openssl")
T0 = datetime(2026, 11, 1, 12, tzinfo=UTC)
SERIES = 'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1",Hostname="n1",job="dcgm"}'
HISTORY = "# TYPE DCGM_FI_DEV_GPU_TEMP gauge\n" + "".join(
    f"{SERIES} {40 + k} {T0.timestamp() + 15 * k:.0f}\n" for k in range(8)
)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    for name in ("ours", "other"):
        make_authority(folder, name)
    make_certificate(folder, "ours", "server", "IP:127.0.0.1,DNS:prom.test")
    make_certificate(folder, "ours", "elsewhere", "DNS:prom.test")
    make_certificate(folder, "ours", "client", "DNS:weatherglass")
    (folder / "password").write_text(PASSWORD + "\n")
    (folder / "wrong").write_text("wrong battery\n")
    return folder


@pytest.fixture(scope="module")
def secure(pki: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecurePrometheus]:
    folder = tmp_path_factory.mktemp("secure")
    server = SecurePrometheus(folder, pki / "server.pem", pki / "server.key", history=HISTORY)
    yield server
    server.stop()


def temperatures(**settings: Any) -> list[float]:
    source = build_telemetry("a", Cluster(**settings), Path())
    try:
        return source.fetch(T0, T0 + timedelta(minutes=2)).gpu["gpu_temp_c"].to_list()
    finally:
        source.close()


def refusal(**settings: Any) -> str:
    with pytest.raises(SourceError) as caught:
        temperatures(**settings)
    text = str(caught.value)
    assert text.startswith("a: ")
    assert PASSWORD not in text
    assert "battery" not in text
    return text


def test_reads_through_tls_with_user_and_password(
    secure: SecurePrometheus, pki: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    # What the environment says of certificates does not take the place of the settings.
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(pki / "other.pem"))
    common = {"prometheus_url": secure.url, "prometheus_ca_file": str(pki / "ours.pem")}
    expected = [40.0 + k for k in range(8)]
    assert temperatures(**common, prometheus_username=USER, prometheus_password_file=str(pki / "password")) == expected
    in_url = secure.url.replace("https://", f"https://{USER}:correct%20horse@")
    assert temperatures(**{**common, "prometheus_url": in_url}) == expected
    assert PASSWORD not in caplog.text
    assert "correct%20horse" not in caplog.text
    assert base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode() not in caplog.text


def test_refusals_say_who_was_refused_and_where_to_look(secure: SecurePrometheus, pki: Path) -> None:
    ours = str(pki / "ours.pem")
    common: dict[str, Any] = {"prometheus_url": secure.url, "prometheus_ca_file": ours}
    wrong = refusal(**common, prometheus_username=USER, prometheus_password_file=str(pki / "wrong"))
    assert "HTTP 401" in wrong
    assert f"user '{USER}' with the password in {pki / 'wrong'} (prometheus_password_file)" in wrong
    assert "set prometheus_username and prometheus_password_file" in refusal(**common)
    token = refusal(**common, prometheus_token_file=str(pki / "wrong"))
    assert f"the token in {pki / 'wrong'} (prometheus_token_file)" in token


def test_certificates_that_are_not_trusted_are_explained(secure: SecurePrometheus, pki: Path) -> None:
    url, user = secure.url, {"prometheus_username": USER, "prometheus_password_file": str(pki / "password")}
    other = refusal(prometheus_url=url, prometheus_ca_file=str(pki / "other.pem"), **user)
    assert f"not signed by the authorities in {pki / 'other.pem'}" in other
    assert "set prometheus_ca_file to the certificate of the authority that signed it" in other
    assert "not signed by the authorities this host trusts" in refusal(prometheus_url=url, **user)
    plain = refusal(prometheus_url=url.replace("https", "http"), **user)
    # Its answer is lost at times: it hangs up while the query is still being sent.
    assert re.search("speaks TLS[:,] write https:// into prometheus_url", plain)
    password = refusal(prometheus_url=url, prometheus_ca_file=str(pki / "password"), **user)
    assert f"prometheus_ca_file = '{pki / 'password'}': holds no certificate in PEM form" in password


def test_server_without_tls_and_foreign_name(pages: Pages, pki: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert "it does not speak TLS" in refusal(prometheus_url=pages.url.replace("http", "https"))
    folder = tmp_path_factory.mktemp("elsewhere")
    server = SecurePrometheus(folder, pki / "elsewhere.pem", pki / "elsewhere.key")
    try:
        text = refusal(prometheus_url=server.url, prometheus_ca_file=str(pki / "ours.pem"))
        assert "its certificate is for another name than '127.0.0.1'" in text
    finally:
        server.stop()


def test_client_certificate(pki: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    server = SecurePrometheus(
        tmp_path_factory.mktemp("mutual"), pki / "server.pem", pki / "server.key", client_ca=pki / "ours.pem",
        basic=False, history=HISTORY,
    )  # fmt: skip
    common: dict[str, Any] = {"prometheus_url": server.url, "prometheus_ca_file": str(pki / "ours.pem")}
    client, key = str(pki / "client.pem"), str(pki / "client.key")
    try:
        assert len(temperatures(**common, prometheus_cert_file=client, prometheus_key_file=key)) == 8
        (pki / "both.pem").write_text((pki / "client.pem").read_text() + (pki / "client.key").read_text())
        assert len(temperatures(**common, prometheus_cert_file=str(pki / "both.pem"))) == 8
        assert "asks for a client certificate: set prometheus_cert_file" in refusal(**common)
        swapped = refusal(**common, prometheus_cert_file=client, prometheus_key_file=str(pki / "server.key"))
        assert f"prometheus_key_file = '{pki / 'server.key'}': is not the key of '{client}'" in swapped
    finally:
        server.stop()


def test_token_and_headers_are_sent_and_a_renewed_token_is_used_at_once(pages: Pages, tmp_path: Path) -> None:
    body = b'{"status":"success","data":{"resultType":"matrix","result":[]}}'
    pages.pages["/api/v1/query"] = (200, "application/json", body)
    token = tmp_path / "token"
    token.write_text("first\n")
    cluster = Cluster(
        prometheus_url=pages.url, prometheus_token_file=str(token), prometheus_headers={"X-Scope-OrgID": "tenant-7"}
    )
    assert "tenant-7" not in repr(cluster)
    source = build_telemetry("a", cluster, tmp_path)
    source.latest()
    token.write_text("second\n")
    source.latest()
    assert [headers["Authorization"] for headers in pages.headers] == ["Bearer first", "Bearer second"]
    assert {headers["X-Scope-OrgID"] for headers in pages.headers} == {"tenant-7"}
    token.unlink()
    with pytest.raises(SourceError, match=r"a: prometheus_token_file = '.*token': cannot be read: No such file"):
        source.latest()
    token.write_text("two\nlines")
    with pytest.raises(SourceError, match=r"prometheus_token_file = '.*token': must hold one line"):
        source.latest()
    token.write_text("")
    with pytest.raises(SourceError, match=r"prometheus_token_file = '.*token': is empty"):
        source.latest()
    source.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prometheus_username": "u"}, r"prometheus_password_file = '': prometheus_username needs it"),
        ({"prometheus_password_file": "f"}, r"prometheus_username = '': prometheus_password_file needs it"),
        ({"prometheus_key_file": "f"}, r"prometheus_cert_file = '': prometheus_key_file needs it"),
        ({"prometheus_username": "u", "prometheus_password_file": "f", "prometheus_token_file": "t"}, "either a token"),
        ({"prometheus_headers": {"X-Key": "two\nsecret"}}, "'X-Key': a header is a name and one line"),
        ({"prometheus_headers": {"Authorization": "secret"}, "prometheus_token_file": "t"}, "'Authorization'.*already"),
        ({"prometheus_headers": {"X-Key": ["secret"]}}, r"prometheus_headers.X-Key = \*\*\*"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        parse_settings({"clusters": {"a": settings}}, {})
    assert "secret" not in str(caught.value)


def test_config_check_names_a_missing_file(tmp_path: Path) -> None:
    config = tmp_path / "weatherglass.toml"
    missing = tmp_path / "token"
    config.write_text(f'[clusters.a]\nprometheus_token_file = "{missing}"\n')
    result = CliRunner().invoke(cli, ["--config", str(config), "config", "check"])
    assert result.exit_code != 0
    assert f"clusters.a.prometheus_token_file = '{missing}': No such file" in str(result.exception)
    missing.write_text("t")
    assert CliRunner().invoke(cli, ["--config", str(config), "config", "check"]).exit_code == 0
