"""Labels of a log resolved many at a time give what they give one by one, whatever their form."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pipelines.sources.remote_write_bulk import BulkSeries
from pipelines.sources.remote_write_series import USELESS, Series
from tests.test_remote_write import gpu_labels, series_bytes

NAMES = (
    "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_PROF_SM_ACTIVE",
    "DCGM_FI_PROF_NVLINK_L3_TX_BYTES", "DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "nvidia_smi_power_draw_watts",
    "nvidia_smi_pcie_link_gen_current", "amd_gpu_gfx_activity", "gpu_xgmi_link_tx",
    "node_infiniband_port_data_received_bytes_total", "ipmi_temperature_celsius", "up", "process_open_fds",
)  # fmt: skip
BARE = "df6e7a7c-7314-46f8-abc4-b88b36dcf3aa"


def resolved(series: Series, numbers: list[int]) -> list[object]:
    """Metric and entity of each series."""
    variants, entities = series.index.names.variants, series.index.entities
    series.settle()
    found = []
    for number in numbers:
        ids = (series.name[number], series.entity[number]) if number != USELESS else None
        found.append(ids and (ids if ids[0] < 0 else (variants[ids[0]].label, entities[ids[1]])))
    return found


def one_by_one(labels: list[bytes]) -> list[object]:
    series = Series()
    return resolved(series, [series.add(one) for one in labels])


def at_once(labels: list[bytes], cut: int = 0) -> list[object]:
    series = BulkSeries()
    numbers = [*series.add_all(labels[:cut]).tolist(), *series.add_all(labels[cut:]).tolist()]
    again = series.add_all(labels)
    assert [n for n in again.tolist() if n != USELESS] == [n for n in numbers if n != USELESS]  # known by now
    return resolved(series, numbers)


CHOICES = {
    "Hostname": ("n1", "n2.example.org", "dcgm-exporter-x2b9k", "<<<NULL>>>", ""),
    "UUID": ("GPU-1", "GPU-2", BARE, "<<<NULL>>>", "0000", "ünïcode"), "uuid": (BARE, ""), "gpu": ("0", "7", "x"),
    "exported_UUID": ("GPU-9",), "instance": ("n1:9400", "10.0.0.7:9400", "[::1]:9"), "nvlink": ("3",), "link": ("2",),
    "device": ("mlx5_0",), "port": ("1",), "GPU_I_ID": ("1", ""), "GPU_I_PROFILE": ("1g.10gb",), "hpc_job": ("4711",),
    "modelName": ("NVIDIA H100 80GB HBM3",), "name": ("Inlet Temp", "x\n\x08__name__\x12y"),
    "DCGM_FI_DRIVER_VERSION": ("550", "570", ""), "long": ("x" * 300,), "job": ("dcgm", "smi", ""),
}  # fmt: skip


def label_sets(seed: int, count: int) -> list[dict[str, str]]:
    """Made-up sets of labels, each once: many share all but their name."""
    draw = random.Random(seed)
    sets: dict[tuple[tuple[str, str], ...], None] = {}
    while len(sets) < count:
        labels = {name: draw.choice(texts) for name, texts in CHOICES.items() if draw.random() < 0.4}
        for name in draw.sample(NAMES, 5):
            sets[tuple(sorted({**labels, "__name__": name}.items()))] = None
    return [dict(labels) for labels in sets]


@pytest.mark.parametrize("seed", range(4))
def test_many_at_once_are_what_they_are_one_by_one(seed: int) -> None:
    labels = [series_bytes(one, []) for one in label_sets(seed, 1_500)]
    assert at_once(labels, cut=400 * seed) == one_by_one(labels)


def test_labels_in_odd_bytes_go_the_slow_way() -> None:
    plain = series_bytes(gpu_labels(NAMES[0]), [])
    latin = plain.replace(b"H100", b"H\xe900")  # no UTF-8
    unnamed = series_bytes({"UUID": "GPU-1"}, [])
    odd = [plain, latin, unnamed, b"", series_bytes(gpu_labels(NAMES[3]), [])]
    assert at_once(odd) == one_by_one(odd)
    assert BulkSeries().add_all([]).tolist() == []


def test_a_fleet_is_one_entity_a_gpu_and_kind() -> None:
    labels = [series_bytes(gpu_labels(name, gpu, f"n{gpu // 8}"), []) for gpu in range(64) for name in NAMES[:4]]
    series = BulkSeries()
    numbers = series.add_all(labels)
    assert np.array_equal(np.sort(numbers), np.arange(len(labels)))
    used = {series.index.entities[i] for i in series.entity.tolist()}
    assert len(used) == 2 * 64  # the GPU, and its health
