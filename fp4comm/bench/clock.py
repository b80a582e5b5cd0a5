"""Wall time of calls that all ranks begin together, with their work on a GPU included."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fp4comm.transport import Lent, Transport

Result = TypeVar("Result")


class Stopwatch:
    """Times calls on one rank; collective, since each call begins with a barrier.

    Args:
        transport: all of its ranks take part.
        device: ``"cpu"`` or ``"cuda"``; on CUDA a call begins when all earlier work of this
            thread's device is done, and ends when its own is.
    """

    def __init__(self, transport: Transport, device: str) -> None:
        """Note whom to wait for."""
        self._transport = transport
        self._device = device

    def time(self, call: Callable[[], Result]) -> tuple[Result, int]:
        """Run a call; return its result and nanoseconds."""
        self._synchronize()
        gather(self._transport, [0], "benchmark barrier")
        start = time.perf_counter_ns()
        result = call()
        self._synchronize()
        return result, time.perf_counter_ns() - start

    def samples_us(self, call: Callable[[], object], repeats: int) -> npt.NDArray[np.float64]:
        """Time repeats of a call after one that does not count: ``[num_ranks, repeats]`` us."""
        call()
        samples = [self.time(call)[1] for _ in range(repeats)]
        return gather(self._transport, samples) / 1e3

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def gather(
    transport: Transport,
    values: npt.ArrayLike,
    phase: str = "benchmark results",
    timeout_s: float | None = None,
) -> npt.NDArray[np.int64]:
    """Bring integers of all ranks to all, ``[num_ranks, len(values)]``; also a barrier.

    Args:
        transport: all of its ranks take part.
        values: as many on each.
        phase: that errors name.
        timeout_s: for a late rank; None: the transport's.
    """
    row = np.asarray(values, np.int64)
    with Lent(transport, phase, transport.timeout_s if timeout_s is None else timeout_s):
        return transport.exchange_counts(np.tile(row, (transport.num_ranks, 1)))
