"""Loops that NumPy cannot say in whole arrays, compiled by Numba on first use and kept on disk beside the bytecode.

Here belong the decorator and sharing rows among threads; each loop stands in the module whose matter it is.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

THREADS = 2  # that one call shares its rows among
_FEWEST = 256  # rows a thread is worth starting for


def compiled(function: F) -> F:
    """The function as machine code that runs without the interpreter's lock; the same bits on every run.

    Where neither the package's folder nor the user's cache can be written, each process compiles it anew.
    """
    import numba

    try:
        return cast(F, numba.jit(nopython=True, nogil=True, cache=True)(function))
    except RuntimeError:  # nowhere to keep it
        return cast(F, numba.jit(nopython=True, nogil=True)(function))


def in_threads(work: Callable[[slice], None], count: int) -> None:
    """Have a compiled function do `count` rows in up to `THREADS` slices at once.

    The threads end with the call, so that a process may fork between calls.
    """
    parts = max(1, min(THREADS, count // _FEWEST))
    edges = [count * k // parts for k in range(parts + 1)]
    slices = [slice(first, last) for first, last in pairwise(edges)]
    if parts == 1:
        work(slices[0])
        return
    with ThreadPoolExecutor(parts - 1) as pool:
        others = pool.map(work, slices[1:])
        work(slices[0])
        list(others)
