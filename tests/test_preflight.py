"""Before anything starts: one run a state folder, free ports, and a demo that removes nothing but its own."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.preflight import StartError, check_ports, claim, demo_settings, fresh_demo_state

ROOT = Path(__file__).parent.parent


def test_two_runs_on_one_state_folder_are_refused(tmp_path):
    lock = claim(tmp_path / "state")
    code = (
        "import sys; from pathlib import Path; from pipelines.preflight import claim\n"
        f"claim(Path({str(tmp_path / 'state')!r}))"
    )
    other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert other.returncode != 0
    assert "another Weatherglass runs on" in other.stderr
    lock.release()
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"state_dir = .*file/deep"):
        claim(tmp_path / "file" / "deep" / "state")


def test_every_busy_port_is_named_with_its_variable():
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = {
            "api.port": ("127.0.0.1", one.getsockname()[1]),
            "dashboards.port": ("127.0.0.1", two.getsockname()[1]),
        }
        with pytest.raises(StartError) as caught:
            check_ports(ports)
    assert "WEATHERGLASS_API__PORT=PORT" in str(caught.value)
    assert "WEATHERGLASS_DASHBOARDS__PORT=PORT" in str(caught.value)


def test_the_demo_removes_its_own_past_and_nothing_else(tmp_path):
    state = tmp_path / "demo"
    fresh_demo_state(state)
    (state / "old").write_text("")
    fresh_demo_state(state)
    assert not (state / "old").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "precious").write_text("")
    with pytest.raises(StartError, match="not made by the demo"):
        fresh_demo_state(mine)
    assert (mine / "precious").exists()


def test_demo_settings_are_right_and_take_the_environment(tmp_path):
    settings, text = demo_settings({"WEATHERGLASS_STATE_DIR": str(tmp_path), "WEATHERGLASS_SIMULATOR__PORT": "9999"})
    assert settings.state == tmp_path
    assert "127.0.0.1:9999/sd" in text
    assert settings.clusters["demo"].telemetry == "scrape"
