"""Loops that NumPy cannot say in whole arrays, compiled by Numba on first use and kept on disk beside the bytecode.

Here belongs the decorator alone; each loop stands in the module whose matter it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """The function as machine code that runs without the interpreter's lock; the same bits on every run.

    Where neither the package's folder nor the user's cache can be written, each process compiles it anew.
    """
    import numba

    try:
        return cast(F, numba.jit(nopython=True, nogil=True, cache=True)(function))
    except RuntimeError:  # nowhere to keep it
        return cast(F, numba.jit(nopython=True, nogil=True)(function))
