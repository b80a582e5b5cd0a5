"""A matrix product to run beside a dispatch: BF16, about as long as the dispatch takes alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fp4comm.bench.clock import Stopwatch

STEP, FIRST, MOST = 16, 256, 4096  # sizes: multiples of STEP; a longer product is repeated
TRIALS = 6  # sizes that are tried at most
REPEATS = 3  # timed calls of each, after one that is not


class Product:
    """Square BF16 matrices that are multiplied, several times one after the other.

    Args:
        size: rows and columns of the matrices.
        repeats: products in one run.
        device: of the matrices.
    """

    def __init__(self, size: int, repeats: int, device: torch.device) -> None:
        """Fill them: zeros would cost a GPU less power."""
        self.size, self.repeats = size, repeats
        shape: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        self._a, self._b = (torch.randn(size, size, **shape) for _ in range(2))
        self._out = torch.empty_like(self._a)

    def run(self) -> None:
        """Multiply on the current stream."""
        for _ in range(self.repeats):
            torch.mm(self._a, self._b, out=self._out)


def sized(stopwatch: Stopwatch, device: torch.device, target_us: float) -> Product:
    """Make a product that takes about target_us on the slowest rank; collective.

    The same on all ranks, since all see the times of all.  Time grows with the cube of the size;
    since it does not for small ones, sizes are tried until one is met again.
    """
    took_us: dict[int, float] = {}
    size = FIRST
    while size not in took_us and len(took_us) < TRIALS:
        took_us[size] = slowest_us(stopwatch, Product(size, 1, device).run)
        wanted = size * (target_us / took_us[size]) ** (1 / 3)
        size = min(MOST, STEP * max(1, round(wanted / STEP)))
    size = min(took_us, key=lambda size: abs(math.log(target_us / took_us[size])))
    return Product(size, max(1, round(target_us / took_us[size])), device)


def slowest_us(stopwatch: Stopwatch, call: Callable[[], object]) -> float:
    """Time a call: median of the slowest rank's times in us."""
    return float(np.median(stopwatch.samples_us(call, REPEATS).max(axis=0)))
