"""The codec: floats -> wire rows -> expert rows -> wire rows -> floats.  A module for each device.

Each implementation has the same functions, and each gives the bytes of `fp4comm.reference`:

    quantize_rows     rows of x -> wire rows, each written to all its places
    to_fp8_rows       wire rows -> FP8 rows, expert-major where a layout is given
    to_bf16_rows      wire rows -> BF16 rows, likewise
    to_fp8_columns    wire rows -> FP8 columns, the operand of the weight gradient
    dequantize        wire rows -> float32
    weighted_reduce   expert outputs -> wire rows of combine
    final_reduce      wire rows of combine -> tokens
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

IMPLEMENTATIONS = ("cpu", "cuda")


def of(device: torch.device) -> Any:
    """Return the implementation for tensors of `device`.

    Raises:
        RuntimeError: there is none for that device, or what it needs is not installed.
    """
    if device.type == "cpu":
        try:
            return importlib.import_module("fp4comm.codec.cpu")
        except ImportError as error:
            raise RuntimeError(f'codec "cpu" needs numba ({error}); pip install numba') from error
    raise RuntimeError(
        f"x: expected a CPU tensor, got one on {device} (codecs here: cpu; use x.cpu())"
    )


def available() -> dict[str, str | None]:
    """Name each implementation with None if it is usable here, else with what it lacks."""
    found: dict[str, str | None] = {"cuda": "not in this release"}
    try:
        of(torch.device("cpu"))
        found["cpu"] = None
    except RuntimeError as error:
        found["cpu"] = str(error)
    return found
