"""Checks of a transport's arguments; an error names the argument, what is expected, what came."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Rows = npt.NDArray[np.uint8]
MAX_ROWS = 2**63 - 1


def as_rows(value: Any, name: str, *, writable: bool) -> Rows:
    """Return ``value``, a NumPy array or a CPU torch tensor, as a NumPy array over the same memory.

    Args:
        value: ``[rows, row_bytes]`` uint8, C-contiguous.
        name: the argument as the error text calls it.
        writable: whether rows are received into it.

    Raises:
        TypeError: if it is no host array of uint8.
        ValueError: if it has other than two dimensions, strides, or is read-only but received into.
    """
    expected = f"{name}: expected a NumPy array or a CPU torch tensor of uint8"
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided:
            raise TypeError(f"{expected}, got a {value.layout} tensor on {value.device}")
        if value.dtype != torch.uint8:
            raise TypeError(f"{expected}, got {value.dtype}")
        value = value.detach().numpy()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{expected}, got {type(value).__name__}")
    if value.dtype != np.uint8:
        raise TypeError(f"{expected}, got {value.dtype}")
    if value.ndim != 2:
        raise ValueError(f"{name}: expected shape [rows, row_bytes], got {list(value.shape)}")
    if not value.flags.c_contiguous:
        raise ValueError(f"{name}: expected C-contiguous rows, got strides {value.strides}")
    if writable and not value.flags.writeable:
        raise ValueError(f"{name}: expected memory to receive into, got a read-only array")
    return value


def check_cuda_rows(value: torch.Tensor, name: str) -> None:
    """Check that a CUDA tensor is ``[rows, row_bytes]`` uint8, C-contiguous.

    Raises:
        TypeError, ValueError: as `as_rows`.
    """
    if value.dtype != torch.uint8 or value.layout != torch.strided:
        raise TypeError(
            f"{name}: expected a strided tensor of uint8, got a {value.layout} one of {value.dtype}"
        )
    if value.dim() != 2:
        raise ValueError(f"{name}: expected shape [rows, row_bytes], got {list(value.shape)}")
    if not value.is_contiguous():
        raise ValueError(f"{name}: expected C-contiguous rows, got strides {value.stride()}")


def common_device(
    sends: Sequence[Any], recvs: Sequence[Any], required: torch.device | None
) -> torch.device | None:
    """Return the CUDA device that all rows are on; None if they are on the host.

    Args:
        sends: one array a stream.
        recvs: likewise.
        required: the only device that rows may be on, if there is one.

    Raises:
        TypeError: naming an array that is not on ``required``.
        ValueError: naming an array that is not where the first one is.
    """
    expected = required
    if expected is None and len(sends) > 0:
        expected = _cuda_device(sends[0])
    for rows in itertools.chain(sends, recvs):
        if _cuda_device(rows) != expected:
            _raise_elsewhere(sends, recvs, expected, required)
    return expected


def _cuda_device(rows: Any) -> torch.device | None:
    return rows.device if isinstance(rows, torch.Tensor) and rows.is_cuda else None


def _raise_elsewhere(
    sends: Sequence[Any],
    recvs: Sequence[Any],
    expected: torch.device | None,
    required: torch.device | None,
) -> None:
    named = [(f"sends[{i}]", rows) for i, rows in enumerate(sends)]
    named += [(f"recvs[{i}]", rows) for i, rows in enumerate(recvs)]
    name, rows = next(pair for pair in named if _cuda_device(pair[1]) != expected)
    what = f"a tensor on {rows.device}" if isinstance(rows, torch.Tensor) else type(rows).__name__
    if required is not None:
        raise TypeError(f"{name}: expected a tensor on {required}, the transport's, got {what}")
    where = "rows on the host" if expected is None else f"a tensor on {expected}"
    raise ValueError(f"{name}: expected {where} as sends[0], got {what}")


def as_splits(value: Any, name: str, num_ranks: int) -> list[int]:
    """Return rows per peer, ``[num_ranks]``, as a list of ints that fit int64; none negative."""
    splits = np.asarray(value, None if hasattr(value, "dtype") else object)  # as they were given
    # As a dispatch gives them; what follows looks at each number.
    if splits.dtype == np.int64 and splits.shape == (num_ranks,) and splits.min() >= 0:
        return splits.tolist()
    if splits.ndim != 1 or len(splits) != num_ranks:
        raise ValueError(
            f"{name}: expected rows for each of {num_ranks} ranks, got shape {list(splits.shape)}"
        )
    rows = [value.item() if hasattr(value, "item") else value for value in splits.tolist()]
    for peer, num_rows in enumerate(rows):
        if isinstance(num_rows, bool) or not isinstance(num_rows, int):
            raise TypeError(f"{name}: expected integers, got {type(num_rows).__name__} at [{peer}]")
        if not 0 <= num_rows <= MAX_ROWS:
            raise ValueError(f"{name}: expected 0..{MAX_ROWS} rows, got {num_rows} at [{peer}]")
    return rows


def check_stream(stream: Any, device: torch.device | None) -> None:
    """Check a caller's stream; one that is used must be on ``device``, which None is not.

    Raises:
        TypeError: it is neither None nor a torch.cuda.Stream.  A handle is none: 0 and 1 mean
            other streams in other libraries.
        ValueError: it belongs to another device than the rows.
    """
    if stream is None:
        return
    if not isinstance(stream, torch.cuda.Stream):
        raise TypeError(
            f"stream: expected a torch.cuda.Stream, got {stream!r}"
            " (torch.cuda.ExternalStream makes one of a handle)"
        )
    if device is not None and stream.device != device:
        raise ValueError(f"stream: expected one on {device} as the rows, got {stream.device}")


def check_row_counts(
    sends: Sequence[Any], to: list[int], recvs: Sequence[Any], came: list[int]
) -> None:
    """Check that arrays ``[rows, row_bytes]`` have the rows of the splits ``to`` and ``came``.

    Raises:
        ValueError: naming the first array that has other rows, or another row than its partner.
    """
    num_sent, num_came = sum(to), sum(came)
    for i, (send, recv) in enumerate(zip(sends, recvs, strict=True)):
        if send.shape[0] != num_sent:
            raise ValueError(
                f"sends[{i}]: expected {num_sent} rows, the sum of send_splits, got {send.shape[0]}"
            )
        if recv.shape[0] < num_came:
            raise ValueError(
                f"recvs[{i}]: expected at least {num_came} rows, the sum of recv_splits,"
                f" got {recv.shape[0]}"
            )
        if recv.shape[1] != send.shape[1]:
            raise ValueError(
                f"recvs[{i}]: expected {send.shape[1]} bytes a row as sends[{i}],"
                f" got {recv.shape[1]}"
            )
