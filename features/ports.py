"""How loaded and how congested the network ports of a node are.

Here belongs what the rates of ports say of their node as a whole; rates stand in `features/cleaning_ports.py`.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Times = NDArray[np.float64]

PORTS = ("port_load_ratio", "port_marks_per_s")
_LOADS = ("tx_bytes_per_s", "rx_bytes_per_s")
_MARKS = ("ecn_marked_per_s", "cnp_per_s")


def node_ports(ports: pl.DataFrame) -> pl.DataFrame:
    """What the ports of a node say at one time.

    Args:
        ports: Rows of `core_port_samples` columns; of the rates, any may be absent.

    Returns:
        A row per node and time, sorted by both: `node`, `ts`; `port_load_ratio`, of the fullest port, of what the link
        can carry; `port_marks_per_s`, congestion marks and notifications of all ports. Null where not known.
    """
    loads = [pl.col(name) for name in _LOADS if name in ports.columns]
    marks = [pl.col(name) for name in _MARKS if name in ports.columns]
    none = pl.lit(None, dtype=pl.Float64)
    speed = pl.when(pl.col("speed_bytes_per_s") > 0).then("speed_bytes_per_s") if "speed_bytes_per_s" in ports else none
    rows = ports.drop_nulls(["node", "ts"]).select(
        "node",
        "ts",
        (pl.max_horizontal(loads) / speed if loads else none).alias(PORTS[0]),
        (pl.sum_horizontal(marks) if marks else none).alias(PORTS[1]),
        (pl.any_horizontal(mark.is_not_null() for mark in marks) if marks else pl.lit(False)).alias("_is_marked"),
    )
    return (
        rows.group_by("node", "ts")
        .agg(
            pl.col(PORTS[0]).max().cast(pl.Float32),
            pl.when(pl.col("_is_marked").any())
            .then(pl.col(PORTS[1]).filter(pl.col("_is_marked")).sum())
            .cast(pl.Float32),
        )
        .sort("node", "ts")
    )


class PortCourse:
    """Ports of nodes over time, to be asked at moments.

    Args:
        ports: Rows of `core_port_samples`; None: nothing is known.
        nodes: Node of each code.
    """

    def __init__(self, ports: pl.DataFrame | None, nodes: list[str]) -> None:
        codes = {name: code for code, name in enumerate(nodes)}
        frame = pl.DataFrame() if ports is None else node_ports(ports.filter(pl.col("node").is_in(nodes)))
        if not frame.height:
            self._node, self._ts = np.zeros(0, dtype=np.int64), np.zeros(0)
            self._values = np.zeros((0, len(PORTS)), dtype=np.float32)
            return
        node = np.array([codes[name] for name in frame["node"].to_list()], dtype=np.int64)
        ts = frame["ts"].dt.epoch("us").to_numpy() / 1e6
        order = np.lexsort((ts, node))
        self._node, self._ts = node[order], ts[order]
        self._values = frame.select(PORTS).to_numpy().astype(np.float32)[order]

    def at(self, node: Ints, at_s: Times, stale_s: float) -> Floats:
        """The newest of nodes at moments, NaN where it is older than `stale_s`; shape (rows, len(PORTS))."""
        out = np.full((len(node), len(PORTS)), np.nan, dtype=np.float32)
        if not len(self._ts):
            return out
        base = min(float(self._ts.min()), float(at_s.min(initial=np.inf)))
        span = (max(float(self._ts.max()), float(at_s.max(initial=-np.inf))) - base + 1) * 2
        row = np.searchsorted(self._node * span + self._ts - base, node * span + at_s - base, side="right") - 1
        fresh = (row >= 0) & (self._node[row] == node) & (at_s - self._ts[row] <= stale_s)
        out[fresh] = self._values[row[fresh]]
        return out
