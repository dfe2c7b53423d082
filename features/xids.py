"""XID codes of NVIDIA's driver: what each means, what to do at once, and whether the GPU is unfit for work after it.

The words follow NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors, state of 2025-10-29); whether a code is
fatal follows NVSentinel's mapping of it. Where well-kept tools contradict them, `disputed` says how: sites may decide
otherwise (`fatal_faults`). How codes become events over time stands in `xid_events.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Action = Literal[
    "ignore", "restart_application", "restart_machine", "restart_vm", "reset_gpu", "check_cables", "workflow",
    "follow_other", "contact_support",
]  # fmt: skip
Class = Literal["application", "driver", "memory", "link", "bus", "power", "security", "consequence", "informational"]

SOURCE = "NVIDIA XID catalogue of 2025-10-29; fatality by NVSentinel"
ACTIONS: dict[str, str] = {
    "ignore": "Nothing at once",
    "restart_application": "Restart the application",
    "restart_machine": "Reboot the node, contact support",
    "restart_vm": "Restart the virtual machine",
    "reset_gpu": "Drain and reset the GPU",
    "check_cables": "Check power cables and seating",
    "workflow": "Follow NVIDIA's workflow for this code",
    "follow_other": "Follow the other code that came with it",
    "contact_support": "Nothing at once; report it",
}


@dataclass(frozen=True, slots=True)
class Xid:
    """One code.

    Attributes:
        code: As the driver prints it.
        meaning: In words an operator knows.
        action: What to do at once; a key of `ACTIONS`.
        kind: What it is about.
        is_fatal: The GPU does no work any more until somebody has acted.
        fault: Kind of fault in `core_faults`; empty when it is none.
        disputed: What other tools say, when they contradict; empty otherwise.
    """

    code: int
    meaning: str
    action: Action
    kind: Class
    is_fatal: bool = False
    fault: str = ""
    disputed: str = ""


def _app(codes: str, meaning: str, disputed: str = "") -> list[Xid]:
    return [Xid(int(c), meaning, "restart_application", "application", disputed=disputed) for c in codes.split()]


def _quiet(codes: str, meaning: str, disputed: str = "") -> list[Xid]:
    return [Xid(int(c), meaning, "ignore", "driver", disputed=disputed) for c in codes.split()]


def _fatal(
    codes: str, meaning: str, fault: str, kind: Class, action: Action = "reset_gpu", note: str = ""
) -> list[Xid]:
    return [Xid(int(c), meaning, action, kind, True, fault, note) for c in codes.split()]


_GPUD_FATAL = "gpud: fatal"
_XIDS: tuple[Xid, ...] = (
    *_app("8", "Channel timed out"),
    *_app("11", "Invalid or corrupted push buffer stream"),
    Xid(13, "Graphics engine exception", "workflow", "application"),
    *_app("25", "Invalid or illegal push buffer"),
    Xid(31, "Memory page fault of an application", "workflow", "application"),
    *_app("32", "Invalid or corrupted push buffer", _GPUD_FATAL),
    *_app("39 40 41", "Copy engine exception"),
    *_app("68 69", "Video or graphics engine exception", _GPUD_FATAL),
    *_app("70 71 72", "Copy engine exception"),
    *_app("75 76 77", "Copy or video engine exception"),
    *_app("80", "Corrupted data sent to the GPU"),
    *_quiet("37", "Driver firmware error"),
    *_quiet("38", "Driver firmware error", _GPUD_FATAL),
    *_quiet("43", "A channel was reset: the application's own fault, or another code's"),
    *_quiet("44", "Fault while contexts were switched", _GPUD_FATAL),
    *_quiet("65", "Video processor exception", _GPUD_FATAL),
    *_quiet("66 67", "Illegal access by the driver"),
    Xid(45, "Preemptive clean-up after another error", "follow_other", "consequence"),
    *_fatal("46", "GPU stopped answering", "gpu_timeout", "driver"),
    *_fatal("48", "Double-bit memory error", "gpu_double_bit_ecc", "memory", "workflow"),
    *_fatal("54", "Auxiliary power is not connected", "gpu_power_cable", "power", "check_cables"),
    *_fatal("62", "Internal micro-controller halted", "gpu_firmware_halt", "driver"),
    Xid(63, "A memory row was remapped or a page retired; it takes effect at the next reset", "ignore", "memory",
        disputed="gpud: fatal, reboot; some pages call it a failure of the remapping, which is 64"),
    *_fatal("64", "A memory row could not be remapped, or a page not retired: replace the board",
            "gpu_row_remap_failed", "memory"),
    *_fatal("74", "NVLink error", "nvlink", "link", "workflow"),
    *_fatal("79", "GPU has fallen off the bus", "gpu_fallen_off_bus", "bus", "restart_machine"),
    Xid(92, "High rate of single-bit memory errors", "contact_support", "memory"),
    Xid(94, "Contained memory error: only its application is lost", "restart_application", "memory",
        disputed="gpud: fatal, reboot at the thousandth; some pages call it an informational single-bit error"),
    *_fatal("95", "Uncontained memory error: every application of the GPU is lost", "gpu_uncontained_memory", "memory"),
    *_fatal("109", "Switching contexts timed out", "gpu_context_timeout", "driver", note="gpud: warning"),
    *_fatal("110", "Security fault", "gpu_security", "security"),
    *_fatal("119", "Call to the GPU's system processor timed out", "gpu_firmware_timeout", "driver"),
    *_fatal("120", "Error of the GPU's system processor", "gpu_firmware_error", "driver"),
    Xid(121, "Error on the chip-to-chip link", "contact_support", "link"),
    *_fatal("136", "NVLink training failed", "nvlink", "link"),
    Xid(137, "Access to a peer over NVLink without the right", "ignore", "link"),
    *_fatal("140", "Memory error that was not recovered", "gpu_unrecovered_ecc", "memory"),
    *_fatal("143", "GPU could not be initialised", "gpu_initialisation", "driver"),
    *_fatal("144 145 146 147 148 149 150", "NVLink 5 error", "nvlink", "link", "workflow"),
    *_fatal("151", "Key rotation failed", "gpu_key_rotation", "security", "restart_vm"),
    Xid(154, "The driver asks for another recovery because of another code", "follow_other", "informational"),
    *_fatal("155", "NVLink error found by software", "nvlink", "link"),
    *_fatal("156", "Resource of the GPU retired", "gpu_resource_retired", "memory"),
    Xid(157, "Resource could not be retired", "ignore", "memory"),
    *_fatal("158", "Fatal timeout", "gpu_fatal_timeout", "driver"),
    Xid(160, "Interference on a channel", "ignore", "driver", disputed="NVSentinel: reboot"),
    Xid(161, "Resource could not be retired", "ignore", "memory"),
    Xid(162, "Power smoothing is at work again", "ignore", "power", disputed="NVSentinel: reset the GPU"),
    Xid(171, "Detail of a double-bit error (48): in device memory", "follow_other", "informational"),
    Xid(172, "Detail of a double-bit error (48): in on-chip memory", "follow_other", "informational"),
)  # fmt: skip

XIDS: dict[int, Xid] = {xid.code: xid for xid in _XIDS}
# Codes that others bring about; also all that are not fatal and follow one that is.
CONSEQUENCES = frozenset(x.code for x in _XIDS if x.action == "follow_other")


# Codes that speak of the board rather than of an application, whether it goes on working or not.
HARDWARE = frozenset(x.code for x in _XIDS if x.is_fatal or x.kind == "memory")


def describe(code: int) -> Xid:
    """The code's entry; one that the catalogue has not is said to be unknown, and not fatal."""
    return XIDS.get(code) or Xid(code, f"XID {code}, not in the catalogue", "contact_support", "informational")


def overridden(said: Mapping[int, Mapping[str, Any]]) -> dict[int, Xid]:
    """The catalogue with what a site says of codes.

    Args:
        said: Code to `action`, `is_fatal` and `meaning`, whichever it gives.

    Raises:
        ValueError: An action is not one of `ACTIONS`; the message names them.
    """
    table = dict(XIDS)
    for code, word in said.items():
        if (action := word.get("action")) is not None and action not in ACTIONS:
            raise ValueError(f"XID {code}: no action {action!r}; actions: {', '.join(ACTIONS)}")
        table[code] = replace(table.get(code) or describe(code), **word)
    return table


def fatal_faults(also: Iterable[int] = (), never: Iterable[int] = ()) -> dict[int, str]:
    """Codes that are hardware faults, with the kind of fault.

    Args:
        also: Codes that the site calls fatal beyond the catalogue.
        never: Codes that it does not; they win.
    """
    left = set(never)
    codes = {code: xid.fault for code, xid in XIDS.items() if xid.is_fatal}
    codes |= {code: codes.get(code) or f"gpu_xid_{code}" for code in also}
    return {code: fault for code, fault in codes.items() if code not in left}


FATAL_FAULTS: dict[int, str] = fatal_faults()
