"""Run a kernel on ranges of rows in a thread pool.

numba's own ``parallel=True`` is not used: with its fallback layer it aborts when several Python
threads call it, and with OpenMP a forked child dies.  Kernels here release the GIL instead.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import os
from collections.abc import Callable

import torch

MIN_BYTES = 1 << 18  # of work a thread: below it, starting one costs more than it saves


def num_threads() -> int:
    """Threads a kernel may use: torch's number, but no more than the cores of this process."""
    return max(1, min(torch.get_num_threads(), num_cores()))


def num_cores() -> int:
    """Cores this process may run on: mpirun binds a rank to one unless told otherwise."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.lru_cache(maxsize=1)
def _pool(pid: int) -> concurrent.futures.ThreadPoolExecutor:
    """Make the pool of this process; a forked child finds another pid and makes its own.

    Kernels never run in the caller's thread: it may flush subnormals (torch.set_flush_denormal),
    which changes bits, and new threads inherit that.
    """
    return concurrent.futures.ThreadPoolExecutor(
        max_workers=max(4, num_cores()),  # the cores of this process may become more
        thread_name_prefix="fp4comm",
        initializer=torch.set_flush_denormal,
        initargs=(False,),
    )


def run(kernel: Callable[..., None], num_rows: int, row_bytes: int, *args: object) -> None:
    """Call ``kernel(first_row, last_row, *args)`` on ranges that cover [0, num_rows) once.

    Args:
        kernel: releases the GIL and writes what belongs to its rows, nothing else.
        num_rows: rows of work; 0 calls nothing.
        row_bytes: bytes read and written a row, to judge how many threads are worth it.
        args: passed on.
    """
    if num_rows == 0:
        return
    parts = max(1, min(num_threads(), num_rows, num_rows * row_bytes // MIN_BYTES))
    bounds = [num_rows * i // parts for i in range(parts + 1)]
    pool = _pool(os.getpid())
    pending = [pool.submit(kernel, *ends, *args) for ends in itertools.pairwise(bounds)]
    concurrent.futures.wait(pending)  # of all, even if one failed: they write to the same arrays
    for part in pending:
        part.result()
