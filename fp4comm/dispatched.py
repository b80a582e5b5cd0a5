"""What dispatch gives: `Dispatched`, its `Handle`, and `Pending` while rows are on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from fp4comm.eager import uncompiled
from fp4comm.hops import Way
from fp4comm.packed import PackedRows
from fp4comm.precision import Precision
from fp4comm.routing import NO_EXPERT, ExpertLayout, RoutePlan
from fp4comm.transport import Transport, Work

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, eq=False)
class Handle:
    """What combine, and a second dispatch, need from a dispatch.  Frozen, reusable.

    Attributes:
        layout: where the wire rows that arrived go; `PackedRows` methods take it.
    """

    layout: ExpertLayout
    _plan: RoutePlan = dataclasses.field(repr=False)
    _way: Way = dataclasses.field(repr=False)
    _transport: Transport = dataclasses.field(repr=False)
    _num_experts: int
    _hidden: int
    _precision: Precision
    _expert_alignment: int
    _device: torch.device
    _name: str  # of the dispatch, the same on all ranks
    # What combine's gradient flows on to, if dispatch is differentiated: see autograd.py.
    _row_weights: torch.Tensor | None = dataclasses.field(default=None, repr=False)
    _anchor: torch.Tensor | None = dataclasses.field(default=None, repr=False)

    @property
    def topk_idx(self) -> torch.Tensor:
        """Local expert of each slot of each wire row, ``[n, K]`` int64; -1: not on this rank."""
        slot_rows = self.layout.slot_rows.long()
        ends = self.layout.expert_offsets[1:]
        return torch.bucketize(slot_rows, ends, right=True).masked_fill_(slot_rows < 0, NO_EXPERT)

    @property
    def topk_weights(self) -> torch.Tensor | None:
        """Weight of each slot of each wire row, ``[n, K]`` float32, 0 where topk_idx is -1.

        None where the dispatch had none.
        """
        return self.layout.weights

    def _check_use(self, transport: Transport, **used: Any) -> None:
        """Refuse use on another transport, or with other arguments than those it was made for.

        Args:
            transport: of the object that it is used with.
            used: arguments of that object, by the names of the fields here without underscore.

        Raises:
            ValueError: naming the first that differs.
        """
        if self._transport is not transport:
            raise ValueError("handle: made on another transport than this object's")
        for name, value in used.items():
            made = getattr(self, f"_{name}")
            if made != value:
                raise ValueError(f"handle: made for {name} {made}, used with {name} {value}")

    def detached(self) -> Handle:
        """Return it without the graph of its dispatch."""
        if self._anchor is None:
            return self
        return dataclasses.replace(self, _row_weights=None, _anchor=None)


@dataclasses.dataclass(frozen=True, eq=False)
class Dispatched:
    """What arrived.  Rows of local expert e are ``rows[expert_offsets[e] :][: num_rows[e]]``.

    They are ordered by source rank, then token, then slot; rows between segments are padding.

    Attributes:
        rows: ``[M, hidden]`` float8_e4m3fn or bfloat16; zero in padding; None if packed.  In
            bfloat16 differentiable, as row_weights are.
        scales: ``[M, ceil(hidden / 128)]`` float32, 1 in padding; None unless fp8.
        row_weights: ``[M]`` float32, the routing weight of each expert row; 0 in padding.
        num_rows: ``[local experts]`` int64 on x's device: live rows of each.
        num_rows_list: the same as ints.
        expert_offsets: ``[local experts + 1]`` int64, multiples of ``expert_alignment``.
        packed: the wire rows that arrived, by source rank and token; by the two-hop route first by
            the rank that relayed them.  The activation cache.
        handle: for `AllToAll.combine`.
    """

    rows: torch.Tensor | None
    scales: torch.Tensor | None
    row_weights: torch.Tensor
    num_rows: torch.Tensor
    num_rows_list: list[int]
    expert_offsets: torch.Tensor
    packed: PackedRows
    handle: Handle


class Pending(Generic[Result]):
    """A dispatch or combine whose rows are under way.  Holds its inputs until `wait`."""

    def __init__(
        self, work: Work | None, tensors: list[torch.Tensor], finish: Callable[[], Result]
    ) -> None:
        """Note the exchange, what is left to do behind it, and the tensors that this reads."""
        self._work = work
        self._tensors = tensors
        self._finish: Callable[[], Result] | None = finish
        self._result: Result | None = None

    @uncompiled
    def wait(self) -> Result:
        """Make the current stream wait for the rows, queue the rest there, return the result.

        A second call returns the same.

        Raises:
            TimeoutError, ConnectionError, RuntimeError: the exchange failed meanwhile.
        """
        if self._finish is not None:
            work, tensors, finish = self._work, self._tensors, self._finish
            self._work, self._tensors, self._finish = None, [], None
            if work is not None:
                work.wait()
                for tensor in tensors:
                    if tensor.is_cuda:  # the stream may be another than that of their memory
                        tensor.record_stream(torch.cuda.current_stream(tensor.device))
            self._result = finish()
        if self._result is None:
            raise RuntimeError("wait: failed before")
        return self._result
