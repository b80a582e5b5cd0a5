"""Rows that are to travel: cast as autocast wants, and where a transport can take them from."""

from __future__ import annotations

from typing import Any

import torch

from fp4comm import codec
from fp4comm.transport import Transport


def autocast(x: Any) -> Any:
    """Cast x as autocast would the input of a matrix product."""
    castable = isinstance(x, torch.Tensor) and x.dtype in (torch.float32, torch.float16)
    if castable and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def check_device(transport: Transport, name: str, device: torch.device) -> None:
    """Check that rows are where a transport can send them.

    Args:
        transport: of this rank.
        name: what error texts call the rows.
        device: where they are.

    Raises:
        ValueError: the transport has another device, or no codec is for this one.
        RuntimeError: the transport cannot take them from a GPU, or not now.
    """
    codec.of(device, name)  # there must be one
    expected = transport.device
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
