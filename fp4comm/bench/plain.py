"""The peer of a dispatch: a plain all-to-all of BF16 rows, one copy for each expert of a token.

What frameworks do today: sort the slots by expert, tell each rank how many rows come for each of
its experts, copy the rows into that order, exchange them.  Nothing is quantized, and rows arrive by
source rank, then expert; putting them expert by expert would come on top.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fp4comm.bench.check import Checked, Checker
from fp4comm.bench.clock import Stopwatch, gather
from fp4comm.bench.rows import Row, across_nodes, row_bytes, timing, traffic
from fp4comm.bench.workload import Workload
from fp4comm.formats import WireFormat
from fp4comm.routing import Placement
from fp4comm.transport import Lent, Transport

BF16 = WireFormat("bf16")


def plain_dispatch(
    transport: Transport, placement: Placement, x: torch.Tensor, topk_idx: torch.Tensor
) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
    """Send a copy of each token to each of its experts.

    Args:
        transport: all of its ranks take part.
        placement: where the experts are.
        x: ``[T, hidden]`` bfloat16.
        topk_idx: ``[T, K]`` int64, -1 for none, on the device of x.

    Returns:
        ``[n, hidden]`` bfloat16 by source rank, expert, token, slot; and how many rows came from
        each rank, ``[num_ranks]``.
    """
    num_experts = placement.num_experts
    flat = topk_idx.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat + 1, minlength=num_experts + 1).tolist()  # of none, then experts
    mine = np.zeros((transport.num_ranks, placement.most_local_experts), np.int64)
    for rank, (first, last) in enumerate(itertools.pairwise(placement.offsets)):
        mine[rank, : last - first] = counts[1 + first : 1 + last]
    recv_splits = transport.exchange_counts(mine).sum(axis=1)
    rows = x.index_select(0, order[counts[0] :] // topk_idx.shape[1])
    received = rows.new_empty((int(recv_splits.sum()), x.shape[1]))
    streams = [rows.view(torch.uint8)], mine.sum(axis=1), [received.view(torch.uint8)], recv_splits
    transport.exchange(*streams)
    return received, recv_splits


class Plain:
    """The peer on one rank, and what was measured of it so far.

    Args:
        transport: all of its ranks take part.
        workload: the inputs.
        device: as `Stopwatch` takes it.
        checker: of this rank.
        node_sizes: ranks of each node.
    """

    def __init__(
        self,
        transport: Transport,
        workload: Workload,
        device: str,
        checker: Checker,
        node_sizes: Sequence[int],
    ) -> None:
        """Start with nothing measured."""
        self._node_sizes = node_sizes
        self._transport, self._workload = transport, workload
        self._stopwatch, self._checker = Stopwatch(transport, device), checker
        self._placement = Placement(workload.num_experts, transport.num_ranks)
        self._samples: list[int] = []
        self._recv_splits = np.zeros(transport.num_ranks, np.int64)
        self._checked = Checked(0, 0)

    def once(self, inputs: tuple[torch.Tensor, ...], *, check_result: bool) -> None:
        """Send every copy, once; inputs as dispatch takes them."""
        x, idx, _ = inputs

        def call() -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
            with Lent(self._transport, "plain all-to-all", self._transport.timeout_s):
                return plain_dispatch(self._transport, self._placement, x, idx)

        (rows, self._recv_splits), took = self._stopwatch.time(call)
        self._samples.append(took)
        if check_result:
            self._checked = self._checker.plain(rows)

    def row(self, warmup: int) -> Row:
        """Gather from all ranks; warmup calls came before those that count."""
        samples = gather(self._transport, self._samples)
        sent_rows = gather(self._transport, self._recv_splits).T
        checked = [self._checked.num_rows, self._checked.num_wrong]
        num_checked, num_wrong = gather(self._transport, checked).sum(axis=0).tolist()
        rows, num_bytes = traffic(sent_rows), row_bytes(BF16, self._workload.hidden)
        between, inside = across_nodes(sent_rows * num_bytes, self._node_sizes)
        return Row(
            op="plain",
            format=BF16.name,
            dispatch=BF16.name,
            tokens=max(self._workload.num_tokens),
            wire_rows=rows,
            wire_bytes=traffic(sent_rows * num_bytes),
            bf16_bytes=rows.sent * num_bytes,
            expert_bytes=rows.total * num_bytes,
            time=timing((samples.max(axis=0) / 1e3).tolist(), warmup),
            parts_us={},
            num_checked=num_checked,
            num_wrong=num_wrong,
            between_bytes=between,
            inside_bytes=inside,
        )
