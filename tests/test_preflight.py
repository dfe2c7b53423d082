"""Before anything starts: one run a state folder, free ports, and a demo that removes nothing but its own."""

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipelines.preflight import StartError, check_ports, claim, demo_settings, fresh_demo_state
from pipelines.settings import parse_settings
from pipelines.settings_files import Listener
from pipelines.sources import SourceError, build_telemetry
from pipelines.supervisor import _Run

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


def test_two_parts_with_one_port_are_named_before_anything_starts(free_port):
    port = free_port()
    receiver = Listener(("clusters", "a", "remote_write_port"), "0.0.0.0", port)
    with pytest.raises(StartError, match=rf"clusters\.a\.remote_write_port = {port}: api\.port has it already"):
        check_ports({"api.port": ("127.0.0.1", port)}, [receiver])
    with pytest.raises(StartError, match=rf"dashboards\.port = {port}: api\.port has it already"):
        check_ports({"api.port": ("127.0.0.1", port), "dashboards.port": ("127.0.0.1", port)})
    with socket.create_server(("127.0.0.1", 0)) as taken:  # the nowcast tries again until it is free
        later = Listener(("clusters", "a", "remote_write_port"), "127.0.0.1", taken.getsockname()[1])
        check_ports({"api.port": ("127.0.0.1", port)}, [later])


def test_a_start_tells_where_a_receiver_listens_or_why_not(tmp_path, capsys, free_port):
    port = free_port()
    data = {"state_dir": str(tmp_path), "clusters": {"a": {"telemetry": "remote-write", "remote_write_port": port}}}
    settings = parse_settings(data, {})
    run = _Run(settings, is_demo=False, dagster=False)
    source = build_telemetry("a", settings.clusters["a"], settings.state)
    with socket.create_server(("127.0.0.1", port)):

        def nowcast():
            time.sleep(0.3)
            with pytest.raises(SourceError):
                source.latest()

        thread = threading.Thread(target=nowcast)
        thread.start()
        run.tell_of_receivers()
        thread.join()
        said = capsys.readouterr().out
        assert f"a: 127.0.0.1:{port} is in use, and what listens there is not the receiver of a" in said
    source.latest()
    try:
        run.tell_of_receivers()
        assert f"receiver     a: listens on http://127.0.0.1:{port}/api/v1/write" in capsys.readouterr().out
    finally:
        source.close()
    status = settings.published / "a" / "nowcast-status.json"
    status.parent.mkdir(parents=True)
    status.write_text('{"problems": {"telemetry-source": "a: it is down", "receiver": "it is down"}}')
    assert run.problems("a") == "it is down"


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
