"""The supervisor's processes: restarted when killed, stopped whole, never left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipelines.processes import Child, Processes

ROOT = Path(__file__).parent.parent
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)",
]
FAMILY = [
    sys.executable,
    "-c",
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    "print(p.pid, flush=True); time.sleep(60)",
]


@pytest.fixture
def processes(tmp_path):
    made = Processes(tmp_path / "logs")
    yield made
    made.stop(grace_s=1)


def until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_killed_service_is_restarted_and_said_so(processes):
    child = processes.start(Child("nowcast", SLEEP))
    first = child.pid
    os.kill(first, signal.SIGKILL)
    events = []
    assert until(lambda: events.extend(processes.watch()) or (child.pid != first and child.is_running))
    assert any("killed by signal 9" in event and "nowcast.log" in event for event in events)
    assert any("restarted" in event for event in events)


def test_a_service_that_keeps_dying_is_restarted_ever_later(processes):
    child = processes.start(Child("api", [sys.executable, "-c", "raise SystemExit(3)"]))
    events = []
    assert until(lambda: events.extend(processes.watch()) or child.failures >= 2)
    assert any("ended with code 3; again in 1 s" in event for event in events)
    assert until(lambda: child.process.poll() is not None)
    assert any("again in 2 s" in event for event in (events + processes.watch()))


def test_a_task_ends_once_and_its_failure_is_said(processes):
    processes.start(Child("good", [sys.executable, "-c", "pass"], is_service=False))
    processes.start(Child("bad", [sys.executable, "-c", "raise SystemExit(4)"], is_service=False))
    assert processes.wait_for("good", 60) == 0
    assert processes.wait_for("bad", 60) == 4
    assert processes.watch() == [f"bad: failed with code 4; see {processes.log_path('bad')}"]
    assert processes.watch() == []


def test_grandchildren_do_not_survive_a_killed_child(processes):
    child = processes.start(Child("daemon", FAMILY))
    log = processes.log_path("daemon")
    assert until(lambda: log.read_text().strip())
    grandchild = int(log.read_text())
    os.kill(child.pid, signal.SIGKILL)
    assert until(lambda: processes.watch() or not alive(grandchild))
    assert until(lambda: not alive(grandchild))


def test_stop_ends_all_and_names_the_stubborn(processes):
    processes.start(Child("polite", FAMILY))
    processes.start(Child("stubborn", STUBBORN))
    assert until(lambda: "deaf" in processes.log_path("stubborn").read_text())
    assert until(lambda: processes.log_path("polite").read_text().strip())
    pids = [child.pid for child in processes.children.values()]
    pids.append(int(processes.log_path("polite").read_text()))
    assert processes.stop(grace_s=3) == ["stubborn"]
    assert until(lambda: not any(alive(pid) for pid in pids))


def test_children_get_term_when_the_supervisor_is_killed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from pipelines.processes import Child, Processes\n"
        f"p = Processes(Path({str(tmp_path)!r})); c = p.start(Child('x', {SLEEP!r})); print(c.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as supervisor:
        pid = int(supervisor.stdout.readline())
        assert alive(pid)
        supervisor.kill()
    assert until(lambda: not alive(pid))


def test_a_service_comes_back_though_its_log_folder_has_gone(processes):
    child = processes.start(Child("nowcast", SLEEP))
    shutil.rmtree(processes.logs)
    processes.logs.write_text("in the way")
    first = child.pid
    os.kill(first, signal.SIGKILL)
    assert until(lambda: processes.watch() or (child.pid != first and child.is_running))
    assert until(lambda: processes.watch() or (child.pid != first and child.is_running))


def test_a_program_that_is_not_there_is_named(processes):
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        processes.start(Child("x", ["no-such-program"]))
