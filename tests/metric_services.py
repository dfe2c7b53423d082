"""More servers of the Prometheus API: a Prometheus behind TLS and basic authentication, and VictoriaMetrics.

Like those of `services.py`, on loopback and a free port, ended by their id.
"""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

from tests.services import Process, Prometheus, answers, free_port, http_get, require

USER, PASSWORD = "weather", "correct horse"
# bcrypt of PASSWORD at the least cost; nothing that Python ships makes one.
_BCRYPT = "$2b$04$abcdefghijklmnopqrstuujydOTSfIH/d5oUHpsygqV5X9xJLQc6e"


def openssl(*arguments: str | Path) -> None:
    """Run openssl; fails with what it said."""
    done = subprocess.run(
        [require("openssl")["openssl"], *map(str, arguments)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr


def make_authority(folder: Path, name: str) -> Path:
    """A certificate authority: `<name>.pem` and `<name>.key` in the folder; returns the former."""
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30",
            "-subj", f"/CN={name}", "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem")  # fmt: skip
    return folder / f"{name}.pem"


def make_certificate(folder: Path, authority: str, name: str, san: str, days: int = 30) -> tuple[Path, Path]:
    """A certificate signed by an authority of the folder, and its key.

    Args:
        folder: Where `make_authority` put the authority.
        authority: Its name.
        name: Common name and name of the files.
        san: Alternative names, as `IP:127.0.0.1`.
        days: Validity.
    """
    pem, key, request, extra = (folder / f"{name}.{suffix}" for suffix in ("pem", "key", "csr", "ext"))
    extra.write_text(f"subjectAltName={san}\n")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
            "-keyout", key, "-out", request)  # fmt: skip
    openssl("x509", "-req", "-in", request, "-CA", folder / f"{authority}.pem", "-CAkey", folder / f"{authority}.key",
            "-CAcreateserial", "-days", str(days), "-extfile", extra, "-out", pem)  # fmt: skip
    return pem, key


class SecurePrometheus(Prometheus):
    """A Prometheus that speaks TLS only and wants USER with PASSWORD.

    Args:
        folder: Where its data go.
        certificate: Its certificate (PEM).
        key: Its key.
        client_ca: Clients must show a certificate of this authority.
        basic: Wants user and password.
        history: OpenMetrics text, as of `Prometheus`.
    """

    def __init__(
        self,
        folder: Path,
        certificate: Path,
        key: Path,
        *,
        client_ca: Path | None = None,
        basic: bool = True,
        history: str | None = None,
    ) -> None:
        tls = {"cert_file": str(certificate), "key_file": str(key)}
        if client_ca is not None:
            tls |= {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": str(client_ca)}
        web = {"tls_server_config": tls, **({"basic_auth_users": {USER: _BCRYPT}} if basic else {})}
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "web.yml"
        config.write_text(json.dumps(web))  # JSON is YAML
        super().__init__(folder, history=history, flags=(f"--web.config.file={config}",))
        self.url = self.url.replace("http://", "https://")

    def start(self) -> None:
        self.process = Process(self._argv, self.folder / "prometheus.log")
        self.process.wait_until(lambda: _listens(self.port), 30, what="prometheus listening")


class VictoriaMetrics:
    """A single VictoriaMetrics with its own data folder.

    Args:
        folder: Where its data and log go.
        flags: Further command line flags.
    """

    def __init__(self, folder: Path, flags: tuple[str, ...] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        argv = [
            require("victoria-metrics")["victoria-metrics"],
            f"-storageDataPath={folder / 'data'}",
            f"-httpListenAddr=127.0.0.1:{self.port}",
            "-retentionPeriod=100y",
            "-memory.allowedBytes=256MB",
            "-loggerLevel=WARN",
            *flags,
        ]
        self.process = Process(argv, folder / "victoria-metrics.log")
        self.process.wait_until(lambda: answers(f"{self.url}/health"), 30, what="victoria-metrics ready")

    def load(self, exposition: str) -> None:
        """Import exposition text whose times are in milliseconds; returns when queries see it."""
        http_get(f"{self.url}/api/v1/import/prometheus", exposition.encode(), timeout_s=60)
        http_get(f"{self.url}/internal/force_flush")

    def stop(self) -> None:
        self.process.stop()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
