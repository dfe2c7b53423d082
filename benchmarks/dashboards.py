"""Pages in a real browser at growing fleets: from opening the address until the answering element holds data.

The first view has an empty browser cache and a reader that has read nothing; the next ones are what a person at work
sees. Served by granian as in production, hints from a list, samples from a real store.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

FLEETS = (32, 1_250, 12_500)
GOAL_S = 1.5
_ANSWERS = {"/": "#fleet-goodness", "/bottlenecks": "#bottlenecks-table tbody tr"}
_WATCH = """
  window.answered = null;
  const watch = setInterval(() => {
    if (document.querySelector('%s')?.textContent) { window.answered = performance.now(); clearInterval(watch); }
  }, 5);
"""


def application():
    """The application of one fleet, for granian; where its store is and how large it is come from the environment."""
    from dashboards.app import create_app
    from pipelines.store import Store
    from tests import dashboard_world as world

    folder, nodes = os.environ["BENCHMARK_STORE"], int(os.environ["BENCHMARK_NODES"])
    store = Store.open(f"sqlite:{folder}/catalogue.sqlite", f"{folder}/data")
    hints = world.FakeHints()
    hints.ttl_s = 3600.0
    hints.gpus = 8 * nodes
    dice = random.Random(1)
    for number in range(max(5, nodes // 60)):
        node = dice.randint(1, nodes)
        hints.bottlenecks.append(
            world.bottleneck(
                number, in_s=dice.uniform(5, 110), node=f"n{node}", rack=f"r{(node - 1) // 8 + 1}",
                bottleneck_class=dice.choice(world.CLASSES),
            )
        )  # fmt: skip
    hints.risks = [world.risk(f"n{node}", dice.random() ** 6) for node in range(1, nodes + 1)]
    return create_app(hints, store.query, clusters=[world.CLUSTER], refresh_s=5).server


def main() -> list[dict]:
    """Rows of the benchmark runner."""
    from pipelines.store import Store
    from tests import dashboard_world as world
    from tests import services

    rows = []
    for nodes in FLEETS:
        with tempfile.TemporaryDirectory() as folder:
            with Store.open(f"sqlite:{folder}/catalogue.sqlite", f"{folder}/data") as store:
                world.fill(store, datetime.now(UTC) - timedelta(seconds=5), nodes, hours=1, per_rack=8)
            for path, answer in _ANSWERS.items():
                first, later = _browse(services, folder, nodes, path, answer)
                name = f"{path} at {8 * nodes:,} GPUs"
                rows.append({"name": f"{name}, first view", "value": first, "unit": "s", "goal": "", "met": None})
                rows.append(
                    {
                        "name": f"{name}, median of 5 more", "value": later, "unit": "s", "goal": f"<= {GOAL_S} s",
                        "met": later <= GOAL_S,
                    }
                )  # fmt: skip
    return rows


def _browse(services, folder: str, nodes: int, path: str, answer: str) -> tuple[float, float]:
    port = services.free_port()
    server = services.Process(
        [sys.executable, "-m", "granian", "--interface", "wsgi", "--port", str(port), "--factory",
         "--blocking-threads", "4", "benchmarks.dashboards:application"],
        Path(folder) / "granian.log",
        env={"BENCHMARK_STORE": folder, "BENCHMARK_NODES": str(nodes)},
    )  # fmt: skip
    try:
        server.wait_until(lambda: services.answers(f"http://127.0.0.1:{port}/assets/glass.svg"), 60, "granian")
        driver = services.start_chromium(Path(folder) / f"profile-{port}")
        try:
            driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH % answer})
            times = [_view(driver, f"http://127.0.0.1:{port}{path}") for _ in range(6)]
        finally:
            driver.quit()
    finally:
        server.stop()
    return times[0], statistics.median(times[1:])


def _view(driver, url: str) -> float:
    driver.get(url)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answered = driver.execute_script("return window.answered")
        if answered is not None:
            return answered / 1000
        time.sleep(0.02)
    raise subprocess.TimeoutExpired(url, 60)


if __name__ == "__main__":
    for row in main():
        print(row)
