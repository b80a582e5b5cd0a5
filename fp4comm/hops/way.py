"""What the routes have in common: the exchanges of an operation, and what a way has to offer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from fp4comm import codec
from fp4comm.routing import ExpertLayout, RelayPlan, RoutePlan
from fp4comm.transport import Transport, Work

Rows = list[torch.Tensor]  # streams with the same splits
Merge = Callable[[Rows, RelayPlan], Rows]


class Exchange:
    """The exchanges of one operation, each with the transport's phase and label lent to it.

    Attributes:
        work: of the last exchange, if that is asynchronous.
    """

    work: Work | None = None

    def __init__(
        self,
        transport: Transport,
        phase: Callable[[str, str], contextlib.AbstractContextManager[None]],
        label: str,
        async_op: bool = False,
    ) -> None:
        """Note what all of them have in common; phase takes a part of the operation and a label."""
        self.phase = phase
        self._transport = transport
        self._label = label
        self._async_op = async_op

    def __call__(
        self,
        sends: Sequence[torch.Tensor],
        send_splits: np.ndarray,
        recv_splits: np.ndarray,
        hop: str = "",
        *,
        is_last: bool = True,
    ) -> Rows:
        """Make room for the rows and exchange them; the last exchange may be asynchronous."""
        num_rows = int(recv_splits.sum())
        recvs = [codec.of(send.device).rows_like(send, num_rows) for send in sends]
        is_async = self._async_op and is_last
        with self.phase("exchange", self._label + hop):
            work = self._transport.exchange(
                sends, send_splits, recvs, recv_splits, async_op=is_async
            )
        self.work = work if is_async else None
        return recvs

    @contextlib.contextmanager
    def beside(self, stream_of: Callable[[torch.device], Any], *reads: torch.Tensor) -> Iterator:
        """Queue several exchanges: if asynchronous, on a stream that the current one goes beside.

        Not in a CUDA graph's capture, which a stream that does not come back would spoil: there the
        exchange itself refuses.

        Args:
            stream_of: gives a stream of a device.
            reads: tensors that are read there.
        """
        is_beside = self._async_op and reads[0].is_cuda
        if not is_beside or torch.cuda.is_current_stream_capturing():
            yield
            return
        stream = stream_of(reads[0].device)
        stream.wait_stream(torch.cuda.current_stream(reads[0].device))
        for tensor in reads:
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            yield


class Way(Protocol):
    """How the rows of one dispatch went; those of its later calls go the same way."""

    @property
    def hops(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rows to and from each rank, ``[num_ranks]`` int64 each, of each exchange forth."""
        ...

    @property
    def tables(self) -> list[torch.Tensor]:
        """Tensors that later calls read."""
        ...

    def forth(self, streams: Rows, exchange: Exchange) -> Rows:
        """Send wire rows, in the order of the plan, to the ranks of their experts."""
        ...

    def back(self, streams: Rows, exchange: Exchange, merge: Merge) -> Rows:
        """Send rows in the order that they arrived in back; merge makes one of several at a relay.

        Returns:
            rows in the order of the plan.
        """
        ...

    def layout(
        self, route: torch.Tensor, num_topk: int, num_rows: np.ndarray, alignment: int
    ) -> ExpertLayout:
        """Lay out the rows that arrived; see `routing.expert_layout`."""
        ...


class Draft(Protocol):
    """What this rank is going to send, planned before it knows what will come."""

    @property
    def plan(self) -> RoutePlan | None:
        """By which its rows are quantized; None: not before the counts have come."""
        ...

    @property
    def num_topk(self) -> int:
        """K."""
        ...

    @property
    def counts(self) -> np.ndarray:
        """What each rank is told, ``[num_ranks, k]`` int64.

        Wire rows that reach it in the end, rows of each expert there, and what else a route wants.
        """
        ...

    def settled(self, counts: np.ndarray) -> SettledDraft:
        """Return it with a plan, now that the counts of all ranks have come."""
        ...


class SettledDraft(Draft, Protocol):
    """A `Draft` that has its plan."""

    @property
    def plan(self) -> RoutePlan:
        """By which its rows are quantized."""
        ...

    def send(self, counts: np.ndarray, sent: Rows, exchange: Exchange) -> tuple[Way, Rows]:
        """Send the wire rows and, as the last stream, the route.

        Args:
            counts: ``[num_ranks, k]`` int64, from each rank.
            sent: payload and scales.
            exchange: of this operation.

        Returns:
            the way that they went, and all streams as they arrived.
        """
        ...


class Route(Protocol):
    """Plans dispatches of one `AllToAll`."""

    def draft(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None) -> Draft:
        """Plan what this rank sends; arguments and errors are those of `routing.plan`."""
        ...
