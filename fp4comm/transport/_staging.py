"""Rows on a GPU for engines that move host memory: through pinned memory, and only what travels.

So MPI and gloo never see a pointer of a GPU, which some of their builds take for one of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fp4comm.transport._arguments import Rows

HostExchange = Callable[[list[Rows], list[int], list[Rows], list[int]], None]


def exchange_staged(
    exchange: HostExchange,
    sends: Sequence[torch.Tensor],
    to: list[int],
    recvs: Sequence[torch.Tensor],
    came: list[int],
    rank: int,
    stream: torch.cuda.Stream,
) -> torch.cuda.Event:
    """Exchange CUDA rows with ``exchange``, which takes host rows and waits for the peers.

    The host waits for what ``stream`` holds so far.  Own rows stay on the GPU.  PyTorch's allocator
    of pinned memory keeps what arrived until it is copied.

    Args:
        exchange: called once with (sends, send_splits, recvs, recv_splits).
        sends: ``[sum(to), row_bytes]`` uint8 each, on the device of ``stream``.
        to: rows for each rank.
        recvs: at least ``[sum(came), row_bytes]`` uint8 each.
        came: rows from each rank.
        rank: this one.
        stream: what the rows are copied on.

    Returns:
        an event after which the rows are in ``recvs``.
    """
    own_sent, own_came = _own_rows(to, rank), _own_rows(came, rank)
    num_others = sum(came) - came[rank]
    with torch.cuda.stream(stream):
        out = [_to_host(send, own_sent) for send in sends]
        fetched = stream.record_event(torch.cuda.Event(blocking=True))
        for send, recv in zip(sends, recvs, strict=True):
            recv[own_came].copy_(send[own_sent])
    into = [_pinned(num_others, recv.shape[1]) for recv in recvs]
    fetched.synchronize()
    exchange(
        [rows.numpy() for rows in out],
        _without(to, rank),
        [rows.numpy() for rows in into],
        _without(came, rank),
    )
    with torch.cuda.stream(stream):
        for recv, rows in zip(recvs, into, strict=True):
            recv[: own_came.start].copy_(rows[: own_came.start], non_blocking=True)
            behind = recv[own_came.stop :][: num_others - own_came.start]
            behind.copy_(rows[own_came.start :], non_blocking=True)
        return stream.record_event()


def _own_rows(splits: list[int], rank: int) -> slice:
    before = sum(splits[:rank])
    return slice(before, before + splits[rank])


def _without(splits: list[int], rank: int) -> list[int]:
    return [*splits[:rank], 0, *splits[rank + 1 :]]


def _pinned(num_rows: int, row_bytes: int) -> torch.Tensor:
    return torch.empty((num_rows, row_bytes), dtype=torch.uint8, pin_memory=True)


def _to_host(rows: torch.Tensor, own: slice) -> torch.Tensor:
    """Copy all rows but the own ones, on the current stream."""
    host = _pinned(len(rows) - (own.stop - own.start), rows.shape[1])
    host[: own.start].copy_(rows[: own.start], non_blocking=True)
    host[own.start :].copy_(rows[own.stop :], non_blocking=True)
    return host
