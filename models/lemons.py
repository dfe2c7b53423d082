"""Lemons: nodes that keep breaking, told by several plain signals over 28 days, with the words for each.

After the detection of lemon nodes by hand-tuned signals over 28 days in Kokolis et al. 2025 ("Revisiting Reliability in
Large-Scale Machine Learning Research Clusters": times out of service, distinct XIDs, tickets, jobs lost), with what is
recorded here. The limits are hand-set, as theirs are. A score says how many signals speak, not how likely a fault is:
that is forecast in `models/node_failure.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from models.fault_history import DAY_S, HOUR_S, FaultHistory

SPAN_S = 28 * DAY_S
# Signal and from where on it speaks; an ECC error remaps a row, so that both are one.
SIGNALS: dict[str, float] = {
    "faults": 2, "same_gpu": 2, "down_hours": 48, "xid_codes": 2, "memory": 1, "link_errors": 100,
}  # fmt: skip
LEMON_SCORE = 3 / len(SIGNALS)  # as many signals make a lemon


@dataclass(frozen=True, slots=True)
class Lemon:
    """What 28 days say of one node.

    Attributes:
        score: Share of `SIGNALS` that speak, 0–1.
        words: What is to be said, most telling first.
        gpu_words: The same for each GPU that has something of its own.
    """

    score: float
    words: list[str]
    gpu_words: dict[str, list[str]] = field(default_factory=dict)


def lemons(
    history: FaultHistory, signs: pl.DataFrame | None, states: pl.DataFrame | None, at_s: float,
    words: Mapping[int, str] | None = None,
) -> list[Lemon]:  # fmt: skip
    """Judge every node of a record.

    Args:
        history: The record; later faults than the moment are not looked at.
        signs: Rows of `features.hardware_signs.SIGN_SCHEMA`; None: none known.
        states: `node`, `gpu_uuid`, `is_remap_pending`, `is_remap_failed` as they are now; None: not known.
        at_s: The moment, seconds.
        words: What to do about XID codes, by code.

    Returns:
        One for each of `history.nodes`.
    """
    everyone = np.arange(len(history.nodes))
    at = np.full(len(everyone), at_s)
    counts = history.count(everyone, at, SPAN_S)
    median = float(np.median(counts)) if len(counts) else 0.0
    down = _down_hours(history, at_s)
    own = _own_signs(signs, states, at_s, words or {})
    out = []
    for i, name in enumerate(history.nodes):
        shown = {gpu: row for (node, gpu), row in own.get(name, {}).items()}
        values, said, of_gpus = _signals(history, i, at_s, int(counts[i]), down[i], shown)
        speaking = sum(values[signal] >= least for signal, least in SIGNALS.items())
        if counts[i]:
            fault = "fault" if counts[i] == 1 else "faults"
            said.insert(0, f"{counts[i]} {fault} in 28 d, fleet median {median:g}")
        out.append(Lemon(speaking / len(SIGNALS), said, of_gpus))
    return out


def _down_hours(history: FaultHistory, at_s: float) -> Sequence[float]:
    begin = np.maximum(history.start, at_s - SPAN_S)
    known_end = np.where(history.end <= at_s, history.end, at_s)  # one that lasts has lasted until now
    hours = np.maximum(np.minimum(known_end, at_s) - begin, 0.0) / HOUR_S
    hours[history.start > at_s] = 0.0
    return np.bincount(history.node, weights=hours, minlength=len(history.nodes)).tolist()


@dataclass
class _Gpu:
    """What the signs of one GPU add up to."""

    amounts: dict[str, float] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)


def _own_signs(
    signs: pl.DataFrame | None, states: pl.DataFrame | None, at_s: float, words: Mapping[int, str]
) -> dict[str, dict[tuple[str, str], tuple[_Gpu, list[str]]]]:
    found: dict[tuple[str, str], _Gpu] = {}
    if signs is not None and not signs.is_empty():
        moments = signs["ts"].dt.epoch("us") / 1e6
        recent = signs.filter((moments > at_s - SPAN_S) & (moments <= at_s))
        for node, gpu, sign, xid, amount in (
            recent.group_by("node", "gpu_uuid", "sign", "xid").agg(pl.col("amount").sum())
            .sort("node", "gpu_uuid", "sign", "xid").iter_rows()
        ):  # fmt: skip
            row = found.setdefault((node, gpu), _Gpu())
            row.amounts[sign] = row.amounts.get(sign, 0.0) + amount
            if xid is not None:
                row.codes[xid] = row.codes.get(xid, 0) + int(amount)
    if states is not None:
        for node, gpu, pending, failed in states.select(
            "node", "gpu_uuid", "is_remap_pending", "is_remap_failed"
        ).iter_rows():
            row = found.setdefault((node, gpu), _Gpu())
            row.states = [*(["remap failed"] if failed else []), *(["remap pending"] if pending else [])]
    out: dict[str, dict[tuple[str, str], tuple[_Gpu, list[str]]]] = {}
    for (node, gpu), row in found.items():
        if said := _words(row.amounts, row.codes, row.states, words):
            out.setdefault(node, {})[node, gpu] = (row, said)
    return out


def _signals(
    history: FaultHistory, node: int, at_s: float, faults: int, down_hours: float,
    shown: Mapping[str, tuple[_Gpu, list[str]]],
) -> tuple[dict[str, float], list[str], dict[str, list[str]]]:  # fmt: skip
    """Signals of a node, words of its signs, words of each GPU."""
    first, last = history.before_span(node, at_s - SPAN_S, at_s)
    of_gpu: dict[str, int] = {}
    for k in range(first, last):
        if history.gpu[k] >= 0:
            uuid = history.gpus[history.gpu[k]][1]
            of_gpu[uuid] = of_gpu.get(uuid, 0) + 1
    codes = {code for row, _ in shown.values() for code in row.codes}
    sums = {sign: sum(row.amounts.get(sign, 0.0) for row, _ in shown.values()) for sign in ("ecc", "remap", "nvlink")}
    waiting = any(row.states for row, _ in shown.values())
    values = {
        "faults": float(faults), "same_gpu": float(max(of_gpu.values(), default=0)), "down_hours": down_hours,
        "xid_codes": float(len(codes)), "memory": sums["ecc"] + sums["remap"] + waiting,
        "link_errors": sums["nvlink"],
    }  # fmt: skip
    said = [f"{n} of them on GPU {uuid}" for uuid, n in of_gpu.items() if n >= SIGNALS["same_gpu"]]
    if down_hours >= SIGNALS["down_hours"]:
        said.append(f"out of service {down_hours:.0f} h of 28 d")
    of_gpus: dict[str, list[str]] = {}
    for uuid, n in of_gpu.items():
        of_gpus[uuid] = [f"{n} {'fault' if n == 1 else 'faults'} in 28 d"]
    for uuid, (_, words) in shown.items():
        of_gpus[uuid] = [*of_gpus.get(uuid, []), *words]
        said += [word for word in words if word not in said]
    if len(shown) > 1:
        said = [word for word in said if not any(word in words for _, words in shown.values())]
        said += _words_of_all(shown)
    return values, said, of_gpus


def _words_of_all(shown: Mapping[str, tuple[_Gpu, list[str]]]) -> list[str]:
    amounts: dict[str, float] = {}
    codes: dict[int, int] = {}
    for row, _ in shown.values():
        for sign, n in row.amounts.items():
            amounts[sign] = amounts.get(sign, 0.0) + n
        for code, n in row.codes.items():
            codes[code] = codes.get(code, 0) + n
    states = [
        state for state in ("remap failed", "remap pending") if any(state in row.states for row, _ in shown.values())
    ]
    return _words(amounts, codes, states, {})


_SAID = {
    "ecc": ("uncorrectable ECC error", "uncorrectable ECC errors"),
    "remap": ("remapped memory row", "remapped memory rows"),
    "nvlink": ("NVLink error", "NVLink errors"),
    "hot": ("hour with thermal slowdown", "hours with thermal slowdown"),
    "silent": ("silence while the node reported", "silences while the node reported"),
}


def _words(
    amounts: Mapping[str, float], codes: Mapping[int, int], states: Sequence[str], words: Mapping[int, str]
) -> list[str]:
    out = list(states)
    for sign, (one, many) in _SAID.items():
        n = round(amounts.get(sign, 0.0))
        if n >= (SIGNALS["link_errors"] if sign == "nvlink" else 3 if sign == "hot" else 1):
            out.append(f"{n:,} {one if n == 1 else many} in 28 d")
    for code, n in sorted(codes.items()):
        what = f" ({words[code]})" if code in words else ""
        out.append(f"{n} × XID {code} in 28 d{what}")
    return out
