"""Runs a compiled function on the threads that PyTorch's own operators use.

A second pool beside PyTorch's would fight with it for the cores, as threads wait for work by spinning. Compilers turn
a parallel region into a call of ``GOMP_parallel(function, argument, threads, flags)``, which every thread of the
pool answers by calling the function with the argument (the interface of GNU's OpenMP runtime, which LLVM's and
Intel's offer on Linux too); this makes the same call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch  # loads the OpenMP runtime, and by that decides which one


@functools.cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """The runtime's entry; None where it has none, as on macOS."""
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
    return function


def available() -> bool:
    return _parallel() is not None


def threads() -> int:
    """How many threads `run` can use here: PyTorch's setting, or 1."""
    return torch.get_num_threads() if available() else 1


def run(function: int, argument: int, parallel: bool) -> None:
    """Call the C function ``void (*)(void *)`` at an address with an argument, without the GIL.

    parallel: on every thread of PyTorch's pool at once, else on this one. No other number is offered: a region of
    another size would make the runtime end threads and start them again at the next operator.
    """
    entry = _parallel() if parallel else None
    if entry is not None:
        entry(function, argument, torch.get_num_threads(), 0)
    else:
        _prototype(function)(argument)


_prototype = functools.cache(ctypes.CFUNCTYPE(None, ctypes.c_void_p))
