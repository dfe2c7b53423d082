"""What tests of the store need from the machine: a small disk of its own, and a real PostgreSQL. Both are fixtures.

Where the machine cannot give one, the test is skipped by its name (`conftest.py` turns that into a failure in CI).
"""

import os
import shutil
import subprocess
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
def postgres(tmp_path_factory):
    """Connection string of a PostgreSQL server of its own, on a free loopback port."""
    programs = services.require("initdb", "postgres")
    folder = Path(tmp_path_factory.mktemp("postgres"))
    prefix = []
    if os.geteuid() == 0:  # the server refuses to run as root
        prefix = [shutil.which("runuser") or "/sbin/runuser", "-u", "postgres", "--"]
        for parent in folder.relative_to("/").parents:
            here = Path("/") / parent
            if not here.stat().st_mode & 0o001:
                here.chmod(here.stat().st_mode | 0o011)
        shutil.chown(folder, "postgres", "postgres")
    port, data = services.free_port(), folder / "data"
    subprocess.run(
        [*prefix, programs["initdb"], "-D", data, "-A", "trust", "-U", "weatherglass", "--no-sync"],
        check=True, capture_output=True, cwd=folder,
    )  # fmt: skip
    server = services.Process(
        [*prefix, programs["postgres"], "-D", data, "-p", str(port), "-F", "-k", folder,
         "-c", "listen_addresses=127.0.0.1"],
        folder.parent / f"{folder.name}.log", cwd=folder,
    )  # fmt: skip
    try:
        server.wait_until(lambda: "ready to accept connections" in server.tail(), 30, "PostgreSQL up")
        yield f"host=127.0.0.1 port={port} user=weatherglass dbname=postgres"
    finally:
        server.stop()
