"""Recording by NVML: what a driver says becomes canonical telemetry; without one it is said what is missing.

No GPU is here, so a small library stands in for the driver's (`nvml_stub.c`); NVML's own Python binding loads it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from features.vocabulary import schema
from tests.services import require, wait_until

COMMAND = [sys.executable, "-m", "weatherglass", "record"]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a driver's library."""
    require("cc")
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml_stub.c")
    subprocess.run(["cc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True)
    return folder


@pytest.fixture
def record(driver: Path, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a recording into `tmp_path`."""

    def start(*arguments: str, stub: str = "", has_driver: bool = True) -> subprocess.Popen[str]:
        env = os.environ | {"WEATHERGLASS_STUB": stub, "SLURM_JOB_ID": "77"}
        env["LD_LIBRARY_PATH"] = str(driver) if has_driver else ""
        return subprocess.Popen(
            [*COMMAND, "--out", str(tmp_path / "gpus.parquet"), *arguments],
            env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return start


def test_values_are_canonical(record: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    child = record("--seconds", "1", "--every", "0.1", "--cluster", "lab", "--node", "n1")
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    rows = pl.read_parquet(tmp_path / "gpus.parquet")
    assert dict(rows.schema) == schema("raw_gpu_samples")
    assert rows.group_by("gpu_uuid").len().sort("gpu_uuid").rows() in [
        [("GPU-one", n), ("GPU-two", n)] for n in range(2, 11)
    ]
    assert "NVIDIA Large" in out
    first = rows.filter(pl.col("gpu_uuid") == "GPU-one").sort("ts")
    gib = 1 << 30
    assert first.row(0, named=True) | {"ts": None} == dict.fromkeys(rows.columns) | {
        "cluster": "lab", "node": "n1", "gpu_uuid": "GPU-one", "gpu_index": 0, "job_id": "77",
        "gpu_util_ratio": pytest.approx(0.97), "fb_used_bytes": 70 * gib, "fb_reserved_bytes": gib,
        "fb_total_bytes": 80 * gib, "gpu_power_w": 651.5, "power_limit_w": 700, "gpu_temp_c": 74, "mem_temp_c": 83,
        "gpu_temp_margin_c": 13, "sm_clock_hz": 1.98e9, "mem_clock_hz": pytest.approx(2.619e9),
        "is_thermal_slowdown": True, "is_power_brake": False, "is_power_capped": True,
        "ecc_uncorrected_total": 5, "remapped_rows_total": 3,
    }  # fmt: skip
    took = first["ts"].diff().dt.total_microseconds().drop_nulls().to_numpy() / 1e6
    sent = first["nvlink_tx_bytes_per_s"].drop_nulls().to_numpy()
    assert len(sent) == first.height - 1
    assert np.median(sent * took) == pytest.approx(1000 * 1024, rel=0.25)  # between readings of the clock
    assert first["nvlink_rx_bytes_per_s"].drop_nulls().to_numpy() * 2 == pytest.approx(sent, rel=1e-5)
    second = rows.filter(pl.col("gpu_uuid") == "GPU-two").row(-1, named=True)
    assert second["gpu_temp_c"] == 31
    assert [second[name] for name in ("gpu_temp_margin_c", "mem_temp_c", "nvlink_tx_bytes_per_s")] == [None] * 3
    assert not second["is_thermal_slowdown"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpus.parquet"]


def test_ctrl_c_keeps_what_there_is(record: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    child = record("--seconds", "3600", "--every", "0.05")
    wait_until(lambda: (tmp_path / "gpus.parquet.parts").is_dir(), 30, what="a recording")
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0, err
    assert "stopped early" in out
    assert pl.read_parquet(tmp_path / "gpus.parquet").height > 0


def test_a_lost_gpu_gives_no_rows_and_the_others_go_on(
    record: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = record("--seconds", "0.8", "--every", "0.1", stub="lost")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    rows = pl.read_parquet(tmp_path / "gpus.parquet")
    counts = dict(rows.group_by("gpu_uuid").len().iter_rows())
    assert counts["GPU-two"] == 2 < counts["GPU-one"]


@pytest.mark.parametrize(
    ("stub", "has_driver", "words"),
    [
        ("", False, "no NVIDIA driver on this host"),
        ("unloaded", True, "installed but not loaded"),
        ("none", True, "shows no GPU"),
    ],
)
def test_it_is_said_what_is_missing(
    record: Callable[..., subprocess.Popen[str]], tmp_path: Path, stub: str, has_driver: bool, words: str
) -> None:
    child = record("--seconds", "1", stub=stub, has_driver=has_driver)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, "Traceback" in err) == (1, False)
    assert words in err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(record: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    there = tmp_path / "gpus.parquet"
    there.write_text("mine")
    child = record("--seconds", "1")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert f"{there} is there already" in err
    assert there.read_text() == "mine"
