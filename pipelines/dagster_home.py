"""Where Dagster keeps its state, and how a process outside Dagster reports to it.

Nothing here imports Dagster: the nowcast calls in here each minute.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pipelines.settings import Settings

log = logging.getLogger(__name__)

ROOT = Path(__file__).parent.parent
NOWCAST_ASSET = "nowcast"


def dagster_environment(settings: Settings) -> dict[str, str]:
    """Environment of every Dagster process: `dagster.yaml` from the program's folder, state under `state_dir`."""
    state = settings.state / "dagster"
    state.mkdir(parents=True, exist_ok=True)
    return {
        "DAGSTER_HOME": str(ROOT),
        "WEATHERGLASS_DAGSTER_HOME": str(state.absolute()),
        "DAGSTER_DISABLE_TELEMETRY": "1",
    }


def report_nowcast(settings: Settings, cluster: str, status: dict[str, Any]) -> bool:
    """Report the nowcast of one cluster as a materialization of the external asset, over Dagster's web server.

    Args:
        settings: Settings; host and port of Dagster's web server come from them.
        cluster: Name of the cluster.
        status: What the nowcast wrote as its status.

    Returns:
        Whether Dagster took it; that it is away is no error.
    """
    import httpx

    url = f"http://{settings.dagster.host}:{settings.dagster.port}/report_asset_materialization/{NOWCAST_ASSET}"
    numbers = {k: v for k, v in status.items() if isinstance(v, (int, float, str)) and not isinstance(v, bool)}
    body = {"metadata": {**numbers, "cluster": cluster}, "description": f"nowcast of {cluster}"}
    try:
        return httpx.post(url, json=body, timeout=10).status_code == 200
    except httpx.HTTPError as error:
        log.debug("Dagster is not there to report to: %s", error)
        return False
