"""The codec: floats -> wire rows -> expert rows -> wire rows -> floats.  A module for each device.

Each implementation has the same functions, and each gives the bytes of `fp4comm.reference`:

    quantize_rows     rows of x -> wire rows, each written to all its places
    to_fp8_rows       wire rows -> FP8 rows, expert-major where a layout is given
    to_bf16_rows      wire rows -> BF16 rows, likewise; weighted in combine's backward
    to_fp8_columns    wire rows -> FP8 columns, the operand of the weight gradient
    dequantize        wire rows -> float32
    row_dots          wire rows, expert outputs -> gradient of each expert row's weight
    weighted_reduce   expert outputs -> wire rows of combine
    final_reduce      wire rows of combine -> tokens
    relay_reduce      wire rows of combine -> fewer of them, on their way to another node
    rows_like         room for rows that arrive
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from fp4comm import cuda_kernels

IMPLEMENTATIONS = ("cpu", "cuda")


def of(device: torch.device, name: str = "x") -> Any:
    """Return the implementation for tensors of `device`, which error texts call ``name``.

    Raises:
        RuntimeError: there is none for that device, or what it needs is missing.
    """
    if device.type not in IMPLEMENTATIONS:
        raise RuntimeError(
            f"{name}: expected a CPU or CUDA tensor, got one on {device} (codecs:"
            f" {', '.join(IMPLEMENTATIONS)}; use {name}.cpu())"
        )
    return _load(device.type)


@functools.cache
def _load(name: str) -> Any:
    """Import an implementation, if it can run here."""
    lacks = cuda_kernels.missing() if name == "cuda" else _lacks_numba()
    if lacks is not None:
        raise RuntimeError(f'codec "{name}" {lacks}')
    return importlib.import_module(f"fp4comm.codec.{name}")


def _lacks_numba() -> str | None:
    try:
        importlib.import_module("numba")
    except Exception as error:  # half-installed packages fail with any
        return f"needs numba ({type(error).__name__}: {error}); pip install numba"
    return None


def available() -> dict[str, str | None]:
    """Name each implementation with None if it is usable here, else with what it lacks."""
    found: dict[str, str | None] = {}
    for name in IMPLEMENTATIONS:
        try:
            _load(name)
            found[name] = None
        except RuntimeError as error:
            found[name] = str(error)
    return found
