"""NumPy arrays as bytes and back, without pickle: the container that forests and curves are kept in."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


class ArraysError(ValueError):
    """Bytes are not an archive of plain arrays, or an array is missing; the message names it."""


def pack_arrays(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays as one `.npz`; the same arrays give the same bytes.

    Raises:
        ArraysError: An array holds Python objects.
    """
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise ArraysError(f"array {name!r} holds Python objects")
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **dict(arrays))
    return buffer.getvalue()


def unpack_arrays(data: bytes, *needed: str) -> dict[str, NDArray[Any]]:
    """Arrays of an `.npz`.

    Raises:
        ArraysError: It is none, holds Python objects, or lacks one of `needed`.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise ArraysError(f"no archive of plain arrays: {error}") from None
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise ArraysError(f"archive lacks {', '.join(missing)}; it has {', '.join(arrays)}")
    return arrays
