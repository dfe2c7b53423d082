"""What tests of the store need from the machine: a small disk of its own, and a real PostgreSQL. Both are fixtures.

Where the machine cannot give one, the test is skipped by its name (`conftest.py` turns that into a failure in CI).
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests import services


@pytest.fixture
def small_disk(tmp_path):
    """A mounted file system of 24 MiB."""
    folder = tmp_path / "small_disk"
    folder.mkdir()
    mount = shutil.which("mount") or "/bin/mount"
    try:
        command = [mount, "-t", "tmpfs", "-o", "size=24m", "weatherglass-test", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        reason = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        pytest.skip(f"needs small_disk, a tmpfs that only root may mount: {reason}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def postgres():
    """Connection string of a PostgreSQL server of its own, on a free loopback port."""
    programs = services.require("initdb", "postgres")
    # Not in pytest's folder: that one is closed to other users, anew whenever a run begins.
    folder = Path(tempfile.mkdtemp(prefix="wg-postgres-"))
    prefix = []
    if os.geteuid() == 0:  # the server refuses to run as root
        prefix = [shutil.which("runuser") or "/sbin/runuser", "-u", "postgres", "--"]
        shutil.chown(folder, "postgres", "postgres")
    port, data = services.free_port(), folder / "data"
    try:
        done = subprocess.run(
            [*prefix, programs["initdb"], "-D", data, "-A", "trust", "-U", "weatherglass", "--no-sync"],
            capture_output=True, text=True, cwd=folder, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        server = services.Process(
            [*prefix, programs["postgres"], "-D", data, "-p", str(port), "-F", "-k", folder,
             "-c", "listen_addresses=127.0.0.1"],
            folder / "postgres.log", cwd=folder,
        )  # fmt: skip
        try:
            server.wait_until(lambda: "ready to accept connections" in server.tail(), 60, "PostgreSQL up")
            yield f"host=127.0.0.1 port={port} user=weatherglass dbname=postgres"
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
