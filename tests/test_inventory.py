"""Nodes from a CSV file, Slurm's topology, Kubernetes' labels and exporters' labels, and who wins."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from features.vocabulary import conform, schema
from pipelines.job_history import ingest_jobs, read_nodes
from pipelines.sources import SourceError
from pipelines.sources.inventory import (
    INVENTORY_SCHEMA,
    NODES_SCHEMA,
    NoJobs,
    complete,
    complete_places,
    exporter_words,
    nodes_frame,
    occupied,
    read_inventory,
)
from pipelines.sources.places import label_places, topology_places
from pipelines.store import Store

AT = datetime(2026, 11, 30, 7, tzinfo=UTC)


def read(tmp_path: Path, text: str | bytes) -> pl.DataFrame:
    path = tmp_path / "inventory.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_inventory(str(path))


def test_every_column_and_host_lists(tmp_path: Path) -> None:
    frame = read(
        tmp_path,
        "\ufeffNode, rack,pod,power_domain,nvlink_domain,gpu_model,gpus,driver_version\r\n"
        '"n[1-3,07]",r1,p1,feed-a,nv1,NVIDIA H100 80GB HBM3,8,550.144.03\r\n'
        "\r\n"
        "n8,r2\r\n"
        "gpu-9.example.org,,,,,,0,\r\n",
    )
    assert dict(frame.schema) == INVENTORY_SCHEMA
    rows = {row["node"]: row for row in frame.iter_rows(named=True)}
    assert list(rows) == ["n1", "n2", "n3", "n07", "n8", "gpu-9.example.org"]
    told = {name: value for name, value in rows["n07"].items() if name not in ("node", "pod", "gpu_model")}
    assert told == {
        "rack": "r1", "power_domain": "feed-a", "nvlink_domain": "nv1", "gpus": 8, "driver_version": "550.144.03",
        "state": None, "reason": None,
    }  # fmt: skip
    assert {name for name, value in rows["n8"].items() if value is not None} == {"node", "rack"}
    assert rows["gpu-9.example.org"]["gpus"] == 0, "no GPUs is a word, nothing is none"
    assert read_inventory("").is_empty()
    stored = nodes_frame(frame, "alpha", AT)
    assert conform(stored, "core_nodes").equals(stored)
    assert set(stored["state"]) == {"UNKNOWN"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found none"),
        ("host\nn1\n", "columns are node, rack.*driver_version.*found host"),
        ("node,racks\nn1,r\n", "columns are node.*found node, racks"),
        ("node,rack,rack\nn1,r,r\n", "each at most once"),
        ("node\nn1\n\nn[1-2]\n", r"line 4: more than one row for n1: line 2 has it"),
        ('node\n"n[1-2,2]"\n', "line 2: more than one row for n2: this line names it twice"),
        ("node,rack\nn[1-2,4],r1\n", "line 2: 3 fields under 2 columns: put the host list in quotes"),
        ("node,gpus\nn1,8\nn2,many\nn3,-1\nn4,8.5\n", "line 3: gpus = 'many'.*line 4: gpus = '-1'.*line 5: gpus"),
        ("node,gpus\nn1,4096\n", "line 2: gpus = '4096': a whole number from 0 to 1024"),
        ("node,gpus\nn1,²\n", "line 2: gpus"),
        ("node\nn[2-1]\n", "line 2: no range"),
        ("node\nn[1-2\n", "line 2: brackets"),
        ("node,rack\n,r1\n", "line 2: no node name"),
        ("node,rack\n  ,r1\n", "line 2: no node name"),
        ("node\n(null)\n", "line 2: node = '\\(null\\)': no name"),
        ("node\nn 1\n", "line 2: node = 'n 1'"),
        ("node\n../etc\n", "line 2: node"),
        ("node\n-n1\n", "line 2: node"),
        ('node,rack\nn1,"r1\nn2,r2\n', "cannot be read"),
        ("node,rack\nn1,r1,p1\n", "line 2: 3 fields under 2 columns"),
        (b"node\nn\xff\n", "not UTF-8 at byte 6"),
        ("node\n" + "x y\n" * 9, "line 6: node = 'x y': no name of a host; and 4 more lines"),
    ],
)
def test_nonsense_is_refused_by_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(SourceError, match=f"(?s)inventory .*{message}"):
        read(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        read_inventory(str(tmp_path / "none.csv"))
    with pytest.raises(SourceError, match="cannot be read"):
        read_inventory(str(tmp_path))
    with pytest.raises(SourceError, match="field larger than"):
        read(tmp_path, "node,rack\nn1," + "x" * 200_000 + "\n")
    with (tmp_path / "large.csv").open("wb") as file:
        file.truncate(1 << 30)  # a gigabyte that is not there
    with pytest.raises(SourceError, match="larger than 64 MiB"):
        read_inventory(str(tmp_path / "large.csv"))


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(("node,gpus\n" + text).encode("utf-8", "surrogatepass"))
    try:
        frame = read_inventory(str(path))
    except SourceError:
        return
    assert frame["node"].is_unique().all()


def test_the_file_completes_what_the_scheduler_says(tmp_path: Path) -> None:
    file = read(tmp_path, "node,rack,power_domain,gpu_model,gpus,state\nn[1-2],r1,f1,NVIDIA H100,8,DOWN\nn3,,,,,\n")
    slurm = pl.DataFrame(
        [("n1", "s1", "p1", None, 4, "IDLE", None), ("n9", "s9", None, None, 4, "DOWN", "why")],
        schema=NODES_SCHEMA, orient="row",
    )  # fmt: skip
    whole = complete(slurm, file).sort("node")
    told = whole.select("node", "rack", "pod", "power_domain", "gpu_model", "gpus", "state", "reason").rows()
    assert told == [
        ("n1", "r1", "p1", "f1", "NVIDIA H100", 8, "IDLE", None),
        ("n2", "r1", None, "f1", "NVIDIA H100", 8, "DOWN", None),
        ("n3", None, None, None, None, None, None, None),
        ("n9", "s9", None, None, None, 4, "DOWN", "why"),
    ]
    assert complete(slurm, read_inventory("")).select(*NODES_SCHEMA).sort("node").equals(slurm.sort("node"))
    jobs = pl.DataFrame({"state": ["RUNNING"], "node_list": ["n2,n7"]})
    busy = occupied(file.drop("state").with_columns(pl.lit(None, dtype=pl.String).alias("state")), jobs)
    assert dict(busy.select("node", "state").rows()) == {
        "n1": "IDLE", "n2": "ALLOCATED", "n3": "IDLE", "n7": "ALLOCATED",
    }  # fmt: skip
    assert busy.filter(pl.col("node") == "n2")["power_domain"].item() == "f1"


def test_cluster_without_a_scheduler(tmp_path: Path) -> None:
    path = tmp_path / "inventory.csv"
    path.write_text("node,nvlink_domain\nn[1-2],nv1\n")
    live = NoJobs("alpha", str(path)).live()
    assert live.jobs.is_empty()
    assert live.nodes.select("cluster", "node", "nvlink_domain").rows() == [
        ("alpha", "n1", "nv1"),
        ("alpha", "n2", "nv1"),
    ]


def test_exporters_name_model_and_driver() -> None:
    slots = pl.DataFrame(
        [
            {"node": "n1", "gpu_uuid": "G1", "gpu_model": "NVIDIA A100", "driver_version": "535.1", "start_time": AT,
             "end_time": AT},
            {"node": "n1", "gpu_uuid": "G2", "gpu_model": "NVIDIA H100 80GB HBM3", "driver_version": "550.1",
             "start_time": AT, "end_time": None},
            {"node": "n1", "gpu_uuid": "G3", "gpu_model": None, "driver_version": None, "start_time": AT,
             "end_time": None},
            {"node": "n2", "gpu_uuid": "G4", "gpu_model": "NVIDIA H100 80GB HBM3", "driver_version": "550.1",
             "start_time": AT, "end_time": None},
        ],
        schema={name: dtype for name, dtype in schema("core_slots").items() if name in (
            "node", "gpu_uuid", "gpu_model", "driver_version", "start_time", "end_time")},
    )  # fmt: skip
    words = exporter_words(slots)
    assert words.rows() == [("n1", "NVIDIA H100 80GB HBM3", 2, "550.1"), ("n2", "NVIDIA H100 80GB HBM3", 1, "550.1")]
    nodes = pl.DataFrame(
        [("n1", None, None, "h100", 8, "IDLE", None), ("n2", None, None, "MI300X", None, "IDLE", None),
         ("n3", None, None, None, None, "IDLE", None)],
        schema=NODES_SCHEMA, orient="row",
    )  # fmt: skip
    known = complete_places(nodes, words)
    assert known.select("node", "gpu_model", "gpus", "driver_version").rows() == [
        ("n1", "NVIDIA H100 80GB HBM3", 8, "550.1"),
        ("n2", "MI300X", 1, "550.1"),
        ("n3", None, None, None),
    ]


def test_the_store_knows_what_exporters_name(tmp_path: Path) -> None:
    path = tmp_path / "inventory.csv"
    path.write_text("node,rack\nn[1-2],r1\n")
    slot = {"cluster": "alpha", "node": "n1", "slot": "0", "gpu_uuid": "G1", "gpu_model": "NVIDIA H100 80GB HBM3",
            "driver_version": "550.1", "start_time": AT}  # fmt: skip
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as store:
        store.transact(lambda w: w.append("core_slots", conform(pl.DataFrame([slot]), "core_slots")))
        for _ in range(2):
            report = ingest_jobs(store, NoJobs("alpha", str(path)), "alpha", AT)
            assert report.error is None
        assert read_nodes(store, "alpha").select("node", "rack", "gpu_model", "gpus", "driver_version").rows() == [
            ("n1", "r1", "NVIDIA H100 80GB HBM3", 1, "550.1"), ("n2", "r1", None, None, None),
        ]  # fmt: skip
        assert report.node_rows == 0, "nothing new, nothing written"


def test_tree_topology() -> None:
    text = (
        "SwitchName=r1 Level=0 LinkSpeed=1 Nodes=n[1-2]\n"
        "SwitchName=r2 Level=0 LinkSpeed=1 Nodes=n[3-4]\n"
        "SwitchName=p1 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=r[1-2]\n"
        "SwitchName=core Level=2 LinkSpeed=1 Nodes=n[1-4] Switches=p1\n"
        "SwitchName=odd Level=0 LinkSpeed=1 Nodes=n[4-\n"
    )
    assert topology_places(text).rows() == [
        ("n1", "r1", "p1", None), ("n2", "r1", "p1", None), ("n3", "r2", "p1", None), ("n4", "r2", "p1", None),
    ]  # fmt: skip


def test_block_topology_gives_nvlink_domains() -> None:
    # One line a record, as with --oneliner, and several, as without.
    text = (
        "BlockName=b1 BlockIndex=0 Nodes=n[1-18] BlockSize=18\n"
        "BlockName=b2 BlockIndex=1\n   Nodes=n[19-36]\n   BlockSize=18\n"
        "AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-36] BlockSize=36\n"
        "BlockName=B1-2 BlockIndex=3 Nodes=n[1-36] BlockSize=36\n"
    )
    places = topology_places(text)
    assert places.height == 36
    assert places.filter(pl.col("node").is_in(["n1", "n36"])).rows() == [
        ("n1", "b1", "B1-2", "b1"), ("n36", "b2", "B1-2", "b2"),
    ]  # fmt: skip
    mixed = topology_places("SwitchName=s1 Level=0 Nodes=n1\nBlockName=b1 BlockIndex=0 Nodes=n1 BlockSize=1\n")
    assert mixed.rows() == [("n1", "s1", None, "b1")]


@given(st.text(alphabet="SwitchNameBlockNodesLv=[]-,019 \n", max_size=300))
def test_any_topology_text(text: str) -> None:
    assert topology_places(text).columns == ["node", "rack", "pod", "nvlink_domain"]


def test_kubernetes_labels() -> None:
    places = label_places(
        [
            {
                "node": "gke-1",
                "label_topology_kubernetes_io_zone": "eu-4a",
                "label_nvidia_com_gpu_product": "NVIDIA-GB200",
                "label_nvidia_com_gpu_count": "4",
                "label_nvidia_com_gpu_clique": "0b1e-uuid.32766",
                "label_nvidia_com_cuda_driver_major": "570",
                "label_nvidia_com_cuda_driver_minor": "124",
                "label_nvidia_com_cuda_driver_rev": "06",
            },
            {"node": "gke-1", "label_topology_kubernetes_io_rack": "r9", "label_topology_kubernetes_io_zone": ""},
            {
                "node": "amd-1",
                "label_amd_com_gpu_product_name": "AMD_Instinct_MI300X",
                "label_nvidia_com_gpu_count": "x",
            },
            {"label_rack": "of nobody"},
        ]
    )
    rows = {row["node"]: row for row in places.iter_rows(named=True)}
    assert rows["gke-1"] == {
        "node": "gke-1", "rack": "r9", "pod": "eu-4a", "nvlink_domain": "0b1e-uuid.32766",
        "gpu_model": "NVIDIA-GB200", "gpus": 4, "driver_version": "570.124.06",
    }  # fmt: skip
    assert (rows["amd-1"]["gpu_model"], rows["amd-1"]["gpus"]) == ("AMD_Instinct_MI300X", None)
    assert label_places([]).is_empty()
