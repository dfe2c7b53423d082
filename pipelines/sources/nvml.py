"""The GPUs of this host, read by NVML: one canonical sample of each, as often as it is asked for.

Here belongs what a driver is asked and in which unit it answers; when it is asked and where samples go stands in
`pipelines/recording.py`. What a board cannot tell is null and is not asked for again.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import polars as pl

from features.vocabulary import conform, schema

KIB = 1024
MAX_COUNTER = 2**53  # a float holds no larger count exactly; boards say "not there" with all bits set
_ALL_LINKS = 0xFFFFFFFF  # scope of a field: all links of the board together
Row = dict[str, Any]


class NvmlError(RuntimeError):
    """There is no GPU to read; the message says what is missing."""


class NvmlReader:
    """Reads every NVIDIA GPU of this host.

    Args:
        cluster: Name of the cluster that the rows are of.
        node: Name of the node; by default the host's.
        job_id: Job of all rows; by default `SLURM_JOB_ID`, if that is set.
        clock: Seconds that never go back, for rates.

    Raises:
        NvmlError: There is no driver, none that answers, or no GPU.
    """

    def __init__(
        self,
        cluster: str,
        node: str | None = None,
        job_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._clock = clock
        self._facts = {
            "cluster": cluster,
            "node": node or socket.gethostname().split(".")[0],
            "job_id": job_id or os.environ.get("SLURM_JOB_ID"),
        }
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self._boards = [self._board(k) for k in range(count)]
        except pynvml.NVMLError as error:
            raise NvmlError(_why(pynvml, error)) from None
        if not count:
            raise NvmlError("the NVIDIA driver is loaded but shows no GPU")
        self._silent: set[tuple[int, str]] = set()
        self._counts: dict[tuple[int, str], tuple[float, float]] = {}

    @property
    def count(self) -> int:
        """GPUs there are."""
        return len(self._boards)

    @property
    def names(self) -> list[str]:
        """Model of each GPU."""
        return [name for _, _, name in self._boards]

    def close(self) -> None:
        """Let go of the driver."""
        self._nvml.nvmlShutdown()

    def read(self) -> list[Row]:
        """One sample of each GPU: columns of `raw_gpu_samples`, in their units.

        Raises:
            NvmlError: The driver went away. A GPU that is lost alone gives no row.
        """
        rows = []
        for index, (handle, uuid, _) in enumerate(self._boards):
            row: Row = self._facts | {"ts": datetime.now(UTC), "gpu_uuid": uuid, "gpu_index": index}
            asked = [name for name in _QUESTIONS if (index, name) not in self._silent]
            for name in asked:
                try:
                    row |= _QUESTIONS[name](self, handle, index)
                except self._nvml.NVMLError as error:
                    if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                        break
                    if error.value in (self._nvml.NVML_ERROR_UNINITIALIZED, self._nvml.NVML_ERROR_DRIVER_NOT_LOADED):
                        raise NvmlError(_why(self._nvml, error)) from None
                    if error.value in (self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                        self._silent.add((index, name))
            else:
                rows.append(row)
        return rows

    def _board(self, index: int) -> tuple[Any, str, str]:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        return handle, self._nvml.nvmlDeviceGetUUID(handle), self._nvml.nvmlDeviceGetName(handle)

    def _rate(self, index: int, name: str, count: float, now: float) -> float | None:
        """Rise of a counter per second since it was last read; null at first and after it fell."""
        before, self._counts[index, name] = self._counts.get((index, name)), (now, count)
        if before is None or count < before[1] or now <= before[0]:
            return None
        return (count - before[1]) / (now - before[0])

    # --- questions: each answers columns ----------------------------------------------------------------------

    def _utilisation(self, handle: Any, _: int) -> Row:
        return {"gpu_util_ratio": self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100}

    def _memory(self, handle: Any, _: int) -> Row:
        told = self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2)
        return {"fb_used_bytes": told.used, "fb_reserved_bytes": told.reserved, "fb_total_bytes": told.total}

    def _power(self, handle: Any, _: int) -> Row:
        return {"gpu_power_w": self._nvml.nvmlDeviceGetPowerUsage(handle) / 1000}

    def _limit(self, handle: Any, _: int) -> Row:
        return {"power_limit_w": self._nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000}

    def _temperature(self, handle: Any, _: int) -> Row:
        return {"gpu_temp_c": self._nvml.nvmlDeviceGetTemperature(handle, self._nvml.NVML_TEMPERATURE_GPU)}

    def _margin(self, handle: Any, _: int) -> Row:
        return {"gpu_temp_margin_c": self._nvml.nvmlDeviceGetMarginTemperature(handle)}

    def _sm_clock(self, handle: Any, _: int) -> Row:
        return {"sm_clock_hz": self._nvml.nvmlDeviceGetClockInfo(handle, self._nvml.NVML_CLOCK_SM) * 1e6}

    def _memory_clock(self, handle: Any, _: int) -> Row:
        return {"mem_clock_hz": self._nvml.nvmlDeviceGetClockInfo(handle, self._nvml.NVML_CLOCK_MEM) * 1e6}

    def _reasons(self, handle: Any, _: int) -> Row:
        nvml = self._nvml
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        heat = nvml.nvmlClocksEventReasonHwThermalSlowdown | nvml.nvmlClocksEventReasonSwThermalSlowdown
        return {
            "is_thermal_slowdown": bool(bits & heat),
            "is_power_brake": bool(bits & nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown),
            "is_power_capped": bool(bits & nvml.nvmlClocksEventReasonSwPowerCap),
        }

    def _ecc(self, handle: Any, _: int) -> Row:
        nvml = self._nvml
        kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
        return {"ecc_uncorrected_total": nvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter)}

    def _remapped(self, handle: Any, _: int) -> Row:
        corrected, uncorrected, _, _ = self._nvml.nvmlDeviceGetRemappedRows(handle)
        return {"remapped_rows_total": corrected + uncorrected}

    def _memory_temperature(self, handle: Any, _: int) -> Row:
        return {"mem_temp_c": self._fields(handle, [self._nvml.NVML_FI_DEV_MEMORY_TEMP])[0]}

    def _nvlink(self, handle: Any, index: int) -> Row:
        nvml = self._nvml
        sent, received = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        told, now = self._fields(handle, [(sent, _ALL_LINKS), (received, _ALL_LINKS)]), self._clock()
        names = ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")
        return {name: self._rate(index, name, count * KIB, now) for name, count in zip(names, told, strict=True)}

    def _fields(self, handle: Any, fields: list[Any]) -> list[int]:
        """Values of fields; the first that the board does not have is the error of all."""
        nvml = self._nvml
        told = nvml.nvmlDeviceGetFieldValues(handle, fields)
        for value in told:
            if value.nvmlReturn != nvml.NVML_SUCCESS:
                raise nvml.NVMLError(value.nvmlReturn)
        found = [_value(nvml, value) for value in told]
        if any(value >= MAX_COUNTER for value in found):
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        return found


_QUESTIONS: dict[str, Callable[[NvmlReader, Any, int], Row]] = {
    name: getattr(NvmlReader, f"_{name}")
    for name in (
        "utilisation", "memory", "power", "limit", "temperature", "margin", "memory_temperature", "sm_clock",
        "memory_clock", "reasons", "ecc", "remapped", "nvlink",
    )
}  # fmt: skip


def frame_of(rows: list[Row]) -> pl.DataFrame:
    """Rows of `read` as a frame of `raw_gpu_samples`; columns that no row has are null."""
    types = schema("raw_gpu_samples")
    names = sorted({name for row in rows for name in row}, key=list(types).index)
    frame = pl.DataFrame({name: [row.get(name) for row in rows] for name in names}, strict=False)
    return conform(frame, "raw_gpu_samples")


def _value(nvml: Any, field: Any) -> int:
    kinds = {
        nvml.NVML_VALUE_TYPE_DOUBLE: "dVal", nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal", nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal", nvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    }  # fmt: skip
    return getattr(field.value, kinds[field.valueType])


def _why(nvml: Any, error: Any) -> str:
    """What is missing, in words."""
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "no NVIDIA driver on this host: libnvidia-ml.so.1 is not there. Record on a host with GPUs"
    if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "the NVIDIA driver is installed but not loaded: see whether `nvidia-smi` answers"
    if error.value == nvml.NVML_ERROR_NO_PERMISSION:
        return "this user may not read the GPUs: is /dev/nvidiactl readable?"
    return f"the NVIDIA driver does not answer: {error}"
