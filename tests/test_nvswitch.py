"""Switches between the GPUs of a node, as dcgm-exporter tells of them: their links are ports."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

from features import metrics
from features.cleaning import clean_port_samples
from pipelines.sources.prometheus import PrometheusSource
from tests.services import Prometheus
from tests.test_wide import START_MS, frames

SENT, GOT = "DCGM_FI_DEV_NVSWITCH_LINK_THROUGHPUT_TX", "DCGM_FI_DEV_NVSWITCH_LINK_THROUGHPUT_RX"
STATUS = "DCGM_FI_DEV_NVSWITCH_LINK_STATUS"
GPU = 'gpu="0",UUID="GPU-1",device="nvidia0",Hostname="n1"'
WARM = 'DCGM_FI_DEV_NVSWITCH_TEMPERATURE_CURRENT{nvswitch="nvswitch0",Hostname="n1"}'
MIBIT = 131_072
STEP_S = 15


def link(number: int, switch: str = "nvswitch0") -> str:
    return f'nvlink="{number}",nvswitch="{switch}",Hostname="n1"'


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"nvlink": "3", "nvswitch": "nvswitch1", "Hostname": "n1"}, ("n1", "nvswitch1", "3")),
        ({"nvlink": "63", "nvswitch": "1", "hostname": "n1"}, ("n1", "nvswitch1", "63")),
        # Newer ones have the labels of a GPU, empty.
        ({"nvlink": "0", "nvswitch": "nvswitch0", "gpu": "", "device": "", "hostname": "n1"}, ("n1", "nvswitch0", "0")),
        ({"nvlink": "0", "nvswitch": "", "gpu": "1", "device": "nvidia1", "hostname": "n1"}, None),  # of a GPU
        ({"nvswitch": "nvswitch0", "hostname": "n1"}, None),  # of no link
        ({"nvlink": "3", "nvswitch": "nvswitch1"}, None),  # of no node
    ],
)
def test_whose_links(labels: dict[str, str], expected: tuple[str, str, str] | None) -> None:
    found = metrics.identify(metrics.BY_NAME[SENT][0], labels)
    assert (found and (found.node, found.device, found.port)) == expected
    assert not found or (found.gpu_uuid, found.link) == ("", None)


def page(step: int) -> str:
    """Two links of one switch, one of another, and a GPU; link 1 loses its connection at step 2."""
    rows = [f"DCGM_FI_DEV_GPU_TEMP{{{GPU}}} 40", f"{WARM} 51"]
    for number, one in enumerate((link(0), link(1), link(0, "nvswitch1")), 1):
        rows += [
            f"{SENT}{{{one}}} {1_000_000 + number * 7_000 * step}",
            f"{GOT}{{{one}}} {2_000_000 + number * 3_000 * step}",
            f"DCGM_FI_DEV_NVSWITCH_LINK_CRC_ERRORS{{{one}}} {number * step}",
            f"DCGM_FI_DEV_NVSWITCH_LINK_REPLAY_ERRORS{{{one}}} 9",
            f"{STATUS}{{{one}}} {3 if number == 2 and step >= 2 else 2}",
        ]
    return "\n".join(rows) + "\n"


def test_links_of_switches_are_ports_and_nothing_else() -> None:
    found = frames(*(page(step) for step in range(4)), step_s=STEP_S)
    assert found.gpu["gpu_temp_c"].to_list() == [40] * 4
    assert found.link.is_empty()
    assert found.node.is_empty()
    first = found.port.filter(port="1").sort("ts")
    assert first["device"].to_list() == ["nvswitch0"] * 4
    assert first["tx_bytes_total"].to_list() == [(1_000_000 + 14_000 * k) * MIBIT for k in range(4)]
    assert first["rx_bytes_total"].to_list() == [(2_000_000 + 6_000 * k) * MIBIT for k in range(4)]
    assert first["port_errors_total"].to_list() == [2 * k + 9 for k in range(4)]
    assert first["is_link_up"].to_list() == [True, True, False, False]
    now = datetime.fromtimestamp(START_MS / 1000 + 3600, UTC)
    clean, wrong = clean_port_samples(found.port, now)
    assert wrong.is_empty()
    rates = (
        clean.drop_nulls("tx_bytes_per_s")
        .group_by("device", "port")
        .agg(pl.col("^.*_per_s$").mean())
        .sort("device", "port")
    )
    assert rates["tx_bytes_per_s"].to_list() == pytest.approx([n * 7_000 * MIBIT / STEP_S for n in (1, 2, 3)])
    assert rates["rx_bytes_per_s"].to_list() == pytest.approx([n * 3_000 * MIBIT / STEP_S for n in (1, 2, 3)])
    assert rates["port_errors_per_s"].to_list() == pytest.approx([n / STEP_S for n in (1, 2, 3)])


def test_values_that_say_not_there_are_no_errors() -> None:
    one, sentinel = link(0), "9223372036854775794"
    found = frames(f"{SENT}{{{one}}} {sentinel}\n{STATUS}{{{one}}} 2", step_s=STEP_S)
    clean, wrong = clean_port_samples(found.port, datetime.fromtimestamp(START_MS / 1000 + 3600, UTC))
    assert clean["tx_bytes_per_s"].to_list() == [None]
    assert wrong["column_name"].to_list() == ["tx_bytes_total"]
    assert clean["is_link_up"].to_list() == [True]


def test_a_state_that_is_not_known_is_none_and_counted() -> None:
    found = frames("\n".join(f"{STATUS}{{{link(number)}}} {state}" for number, state in enumerate((-1, 0, 2, 4))))
    assert found.port.sort("port").select("is_link_up", "unknown_flags").rows() == [
        (None, "is_link_up"), (False, None), (True, None), (False, None),
    ]  # fmt: skip


@pytest.mark.services("prometheus", "promtool")
def test_read_from_a_server(prometheus: Callable[..., Prometheus]) -> None:
    start = datetime.fromtimestamp(START_MS / 1000, UTC)
    samples: dict[str, list[str]] = {}
    for step in range(4):
        for row in page(step).splitlines():
            name, ts = row.split("{")[0], START_MS / 1000 + step * STEP_S
            samples.setdefault(name, []).append(f"{row} {ts:.3f}")
    ordered = {name: sorted(rows, key=lambda row: row.rpartition("} ")[0]) for name, rows in samples.items()}
    history = "".join(f"# TYPE {name} gauge\n" + "\n".join(rows) + "\n" for name, rows in ordered.items()) + "# EOF\n"
    source = PrometheusSource("a", prometheus(history=history).url, exporter_interval_s=STEP_S)
    try:
        got = source.fetch(start, start + timedelta(minutes=1))
    finally:
        source.close()
    assert len(got.port) == 12
    assert set(got.port.select("node", "device", "port").iter_rows()) == {
        ("n1", "nvswitch0", "0"), ("n1", "nvswitch0", "1"), ("n1", "nvswitch1", "0"),
    }  # fmt: skip
    assert got.port["tx_bytes_total"].max() == (1_000_000 + 63_000) * MIBIT
