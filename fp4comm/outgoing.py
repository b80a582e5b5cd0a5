"""Rows that are to travel: their form, and that they are where a transport can take them from."""

from __future__ import annotations

from typing import Any

import torch

from fp4comm import check, codec
from fp4comm.transport import Transport


def rows_for(transport: Transport, name: str, x: Any, hidden: int | None = None) -> check.Rows:
    """Check rows that are to travel by a transport.

    Args:
        transport: of this rank.
        name: what error texts call them.
        x: as for `AllToAll.dispatch`.
        hidden: which they have to have; None: any.

    Returns:
        contiguous and detached, cast under autocast.

    Raises:
        ValueError, TypeError: dtype, shape or device do not fit.
        RuntimeError: they are on a GPU, and the transport cannot take them from there, or not now.
    """
    rows = check.rows(name, _autocast(x), (torch.bfloat16,), hidden)
    device, expected = check.codes(rows).device, transport.device
    codec.of(device)  # there must be one
    if expected is not None and device != expected:
        raise ValueError(
            f'{name}: expected on {expected}, the device of transport "{transport.name}", got'
            f" {device}"
        )
    if device.type == "cuda" and transport.cuda_missing is not None:
        raise RuntimeError(f"{name}: expected on the CPU: {transport.cuda_missing}")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name}: expected outside of a CUDA graph's capture: the counts are read by the host,"
            " and an exchange is not captured"
        )
    return rows


def _autocast(x: Any) -> Any:
    """Cast x as autocast would the input of a matrix product."""
    castable = isinstance(x, torch.Tensor) and x.dtype in (torch.float32, torch.float16)
    if castable and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x
