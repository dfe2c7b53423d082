"""Ports as `weatherglass doctor` sees them: free, served by the part of Weatherglass they are for, or a stranger's.

Receivers of remote-write are looked at by their own source; here only that nobody else of us has their port.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pipelines.settings import Settings
from pipelines.settings_files import port_conflicts

if TYPE_CHECKING:
    import httpx

_Recognise = Callable[["httpx.Response"], bool]


def _is_hints_api(answer: httpx.Response) -> bool:
    return answer.json() == {"status": "ok"}


def _is_dashboards(answer: httpx.Response) -> bool:
    return "Weatherglass" in answer.text


def _is_dagster(answer: httpx.Response) -> bool:
    return "dagster_webserver_version" in answer.json()


def look_at_ports(settings: Settings) -> Iterator[tuple[str, bool, str]]:
    """Setting, whether it is well, and what was seen or what to do.

    A port must be free, or already served by the part of Weatherglass that it is for.
    """
    api, dashboards, dagster = settings.api, settings.dashboards, settings.dagster
    ports: list[tuple[str, str, int, str, str, _Recognise]] = [
        ("api.port", api.host, api.port, "/healthz", "the hints API", _is_hints_api),
        ("dashboards.port", dashboards.host, dashboards.port, "/", "the dashboards", _is_dashboards),
    ]
    if dagster.enabled:
        ports.append(("dagster.port", dagster.host, dagster.port, "/server_info", "Dagster", _is_dagster))
    conflicts = {".".join(location): text for location, text in port_conflicts(settings)}
    for setting, text in conflicts.items():
        yield setting, False, text
    for setting, host, port, path, what, is_ours in ports:
        if setting in conflicts:
            continue
        reason = bind_error(host, port)
        if reason is None:
            yield setting, True, f"{host}:{port} is free"
        elif reason.errno != errno.EADDRINUSE:
            name = setting.replace("port", "host")
            yield setting, False, f"cannot listen on {host}:{port}: {reason.strerror}; set {setting} or {name}"
        elif _answers(host, port, path, is_ours):
            yield setting, True, f"{host}:{port}: {what} of Weatherglass answers there"
        else:
            wrong = f"{host}:{port} is in use, and what listens there is not {what} of Weatherglass"
            yield setting, False, f"{wrong}; stop it or set {setting}"


def bind_error(host: str, port: int) -> OSError | None:
    """Why nothing can listen there; None: it can."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def _answers(host: str, port: int, path: str, is_ours: _Recognise) -> bool:
    """Whether the part of Weatherglass that is expected there answers."""
    import httpx

    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{here}]:{port}{path}" if ":" in here else f"http://{here}:{port}{path}"
    try:
        answer = httpx.get(url, timeout=2, trust_env=False)
        return answer.status_code == 200 and is_ours(answer)
    except (httpx.HTTPError, ValueError, TypeError):  # no HTTP, no JSON, JSON that is no object
        return False
