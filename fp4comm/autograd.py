"""Differentiable dispatch and combine: the gradient of each goes the other's way.

    dispatch    x, topk_weights -> rows, row_weights    backward: an unweighted combine
    combine     expert_out, row_weights -> y            backward: a dispatch with the handle

Quantization is passed straight through.  The exchanges of a backward pass are collective as those
of the calls are: all ranks differentiate, in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from fp4comm import check, codec
from fp4comm.caller import Caller
from fp4comm.dispatched import Dispatched, Handle
from fp4comm.formats import WireFormat
from fp4comm.hops import Rows, Way
from fp4comm.routing import ExpertLayout, RelayPlan, RoutePlan

Gradients = tuple[torch.Tensor | None, ...]


def check_inputs(arrive: str, x: Any, topk_weights: Any = None) -> None:
    """Refuse gradients of what dispatch cannot differentiate.

    Raises:
        RuntimeError: rows arrive as FP8 or packed, or x is an FP8 pair, and a gradient is wanted;
            or an input has a tangent of forward-mode differentiation.
    """
    parts = x if isinstance(x, (tuple, list)) else (x,)
    check.no_tangent("x", *parts)
    check.no_tangent("topk_weights", topk_weights)
    if arrive != "bf16":
        reason = f'arrive="bf16" is differentiable, arrive="{arrive}" is for functions with a'
        reason += " backward of their own, as fp4comm.experts"
        check.no_gradient("x", *parts, reason=reason)
        check.no_gradient("topk_weights", topk_weights, reason=reason)
    elif isinstance(x, (tuple, list)):
        check.no_gradient("x", *parts, reason="an FP8 pair is not differentiable")


@contextlib.contextmanager
def checked_inputs(arrive: str, x: Any, topk_weights: Any) -> Iterator[None]:
    """Check them on entry, see `check_inputs`."""
    check_inputs(arrive, x, topk_weights)
    yield


class Edge(torch.autograd.Function):
    """A stand-in without memory, by which a gradient goes where a tensor's graph leads it now.

    A call that is over at `Pending.wait` differentiates there; the tensor may have another history
    by then.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stand-in."""
        ctx.set_materialize_grads(False)
        return tensor.new_empty(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Hand the gradient on."""
        return gradients


def edge_of(name: str, tensor: Any) -> torch.Tensor | None:
    """Return a tensor's `Edge`; None if it wants no gradient.

    Raises:
        RuntimeError: it is a view whose graph was lost by a change of its base.
    """
    if not check.wants_gradient(tensor):
        return None
    try:
        return Edge.apply(tensor)
    except RuntimeError as error:
        raise RuntimeError(f"{name}: {error}") from error


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """Edges of the inputs of a dispatch; None for one that wants no gradient."""

    x: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None

    @staticmethod
    def of(x: Any, topk_weights: Any = None) -> Inputs:
        """Make them."""
        return Inputs(edge_of("x", x), edge_of("topk_weights", topk_weights))

    @property
    def wanted(self) -> int:
        """Which gradients are wanted, as a number of `agreement.GRADIENTS`."""
        return (self.x is not None) + 2 * (self.topk_weights is not None)


NONE = Inputs()


@dataclasses.dataclass(frozen=True, eq=False)
class Outputs:
    """Expert outputs that a combine is differentiated with.

    Attributes:
        edge: of them; None if they want no gradient.
        values: that the gradient of the weights is made of; None if those want none.
    """

    edge: torch.Tensor | None
    values: torch.Tensor | None

    @staticmethod
    def of(expert_out: Any, rows: torch.Tensor, handle: Handle, weighted: bool) -> Outputs | None:
        """Return None if combine is not to be differentiated.

        A rank that no rows came to takes part as soon as its dispatch does: its experts may have
        made their output from nothing.

        Args:
            expert_out: what combine was given.
            rows: the same as a contiguous tensor outside of any graph.
            handle, weighted: as combine was given them.
        """
        if not torch.is_grad_enabled():
            return None
        through_weights = weighted and handle._row_weights is not None
        without_rows = handle._anchor is not None and not any(handle.layout.num_rows_list)
        if not (check.wants_gradient(expert_out) or through_weights or without_rows):
            return None
        values = None
        if through_weights:  # changes of foreign memory would not be noticed
            is_tensor = isinstance(expert_out, torch.Tensor)
            values = expert_out.detach() if is_tensor else rows.clone()
            check.no_inference("expert_out", values)
        return Outputs(edge_of("expert_out", expert_out), values)


def of_dispatch(caller: Caller, d: Dispatched, inputs: Inputs, name: str) -> Dispatched:
    """Make what a dispatch returned differentiable; rows that stay packed get a stand-in.

    That has their shape and no memory: gradients come in by it, and nobody reads it.  A checkpoint
    that has recomputed enough leaves from here by an exception, which is no failure.
    """
    rows = d.rows
    if rows is None:
        shape = d.handle.layout.num_expert_rows, d.handle._hidden
        rows = torch.empty((), dtype=torch.bfloat16, device=d.packed.payload.device).expand(shape)
    handle = dataclasses.replace(d.handle, _name=name)
    with torch.enable_grad():
        edges = inputs.x, inputs.topk_weights
        rows, row_weights, anchor = Dispatch.apply(*edges, caller, handle, [rows.data])
        kept = row_weights if row_weights.requires_grad else None
        return dataclasses.replace(
            d,
            rows=rows,
            # A copy, so that the caller may change it in place.
            row_weights=d.row_weights if kept is None else kept.clone(),
            handle=dataclasses.replace(handle, _row_weights=kept, _anchor=anchor),
        )


def of_combine(
    caller: Caller,
    y: torch.Tensor,
    outputs: Outputs,
    handle: Handle,
    weighted: bool,
    name: str,
) -> torch.Tensor:
    """Make what a combine of that name returned differentiable."""
    with torch.enable_grad():
        row_weights = handle._row_weights if weighted else None
        tensors = outputs.edge, row_weights, handle._anchor
        made = [y.data, outputs.values]
        return Combine.apply(*tensors, caller, handle.detached(), weighted, name, made)


class Dispatch(torch.autograd.Function):
    """Backward: an unweighted combine on the dispatch_grad wire; beside it those of the weights.

    The third output is empty.  Combine takes it as an input, so that this backward runs on every
    rank, whatever its experts did with their rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        topk_weights: Any,
        caller: Caller,
        handle: Handle,
        made: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Return what was made, and note the way back."""
        ctx.caller, ctx.handle = caller, handle
        ctx.dtypes = [None if t is None else t.dtype for t in (x, topk_weights)]
        ctx.set_materialize_grads(False)
        # Reading it back makes a checkpoint recompute on every rank, whatever its experts kept.
        ctx.save_for_backward(handle.layout.num_rows)
        rows, row_weights = made.pop(), handle.layout.row_weights.detach()
        outputs = zip((rows, row_weights), ctx.needs_input_grad[:2], strict=True)
        ctx.mark_non_differentiable(*(output for output, wants in outputs if not wants))
        return rows, row_weights, row_weights.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Gradients:
        """Send the gradients of rows and row weights back to their tokens."""
        caller, handle, operation = ctx.caller, ctx.handle, "dispatch backward"
        plan, layout, device, way = handle._plan, handle.layout, handle._device, handle._way
        wire, implementation = WireFormat.of(handle._precision.dispatch_grad), codec.of(device)
        hidden = handle._hidden
        x_wants, weights_want, *_ = ctx.needs_input_grad
        grad_x = grad_weights = None

        def merge(came: Rows, relay: RelayPlan) -> Rows:
            slots = [_relay_sums(came.pop(), relay)] if weights_want else []
            rows = implementation.relay_reduce(*came, wire, hidden, relay) if x_wants else ()
            return [*rows, *slots]

        with torch.no_grad(), caller._stopping_peers(operation):
            _ = ctx.saved_tensors
            _keep_for_this_stream(plan, layout, way)
            with caller._phase(operation, "reduce"):
                rows, row_weights, _ = gradients
                sent: list[torch.Tensor] = []
                if x_wants:
                    if rows is None:
                        shape = layout.num_expert_rows, hidden
                        rows = torch.zeros(shape, dtype=torch.bfloat16, device=device)
                    sent += implementation.weighted_reduce(
                        rows.resolve_neg().contiguous(), layout, wire, weighted=False
                    )
                if weights_want:
                    sent.append(_slot_gradients(row_weights, layout).view(torch.uint8))
            exchange = caller._exchange(operation, f"backward of {handle._name}")
            received = way.back(sent, exchange, merge)
            with caller._phase(operation, "reduce"):
                if weights_want:
                    slots = received.pop().view(torch.float32)
                    grad_weights = _token_sums(slots, plan).to(ctx.dtypes[1])
                if x_wants:
                    grad_x = implementation.final_reduce(*received, wire, hidden, plan)
                    grad_x = grad_x.to(ctx.dtypes[0])
        return *differentiable_once(grad_x, grad_weights), None, None, None


class Combine(torch.autograd.Function):
    """Backward: dy goes to the experts' ranks on the combine_grad wire, and is weighted there."""

    @staticmethod
    def forward(
        ctx: Any,
        expert_out: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        anchor: torch.Tensor | None,
        caller: Caller,
        handle: Handle,
        weighted: bool,
        name: str,
        made: list[Any],
    ) -> torch.Tensor:
        """Return what was made; keep the outputs' values if weights want a gradient."""
        ctx.caller, ctx.handle, ctx.weighted, ctx.name = caller, handle, weighted, name
        y, values = made
        made.clear()
        if values is not None:
            ctx.save_for_backward(values)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Send dy to the experts' ranks; give expert_out and row_weights their gradients."""
        caller, handle, operation = ctx.caller, ctx.handle, "combine backward"
        plan, layout, device, way = handle._plan, handle.layout, handle._device, handle._way
        wire, implementation = WireFormat.of(handle._precision.combine_grad), codec.of(device)
        grad_out = grad_weights = None
        with torch.no_grad(), caller._stopping_peers(operation):
            saved = ctx.saved_tensors  # before the exchange, for a checkpoint recomputes here
            _keep_for_this_stream(plan, layout, way)
            with caller._phase(operation, "quantize"):
                dy = gradients[0].resolve_neg().contiguous()
                sent = [*implementation.quantize_rows(dy, wire, plan)]
            received = way.forth(sent, caller._exchange(operation, f"backward of {ctx.name}"))
            rows = *received, wire, handle._hidden
            with caller._phase(operation, "arrive"):
                if ctx.needs_input_grad[0]:
                    weights = _row_weights(layout) if ctx.weighted else None
                    grad_out = implementation.to_bf16_rows(*rows, layout, weights)
                if ctx.needs_input_grad[1]:
                    expert_out = saved[0].resolve_neg().contiguous()
                    grad_weights = implementation.row_dots(*rows, expert_out, layout)
        return *differentiable_once(grad_out, grad_weights), None, None, None, None, None, None


class Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient."""
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Gradients:
        """Refuse."""
        raise RuntimeError(
            "backward: expected to be differentiated once, got a second derivative of dispatch,"
            " combine, experts or all_to_all_rows (what the gradients of quantized rows depend on"
            " is not kept)"
        )


def differentiable_once(*gradients: torch.Tensor | None) -> Gradients:
    """Under create_graph=True, make a second derivative an error rather than zero."""
    if not torch.is_grad_enabled():
        return gradients
    return tuple(None if g is None else Once.apply(g.requires_grad_()) for g in gradients)


def _slot_gradients(row_weights: torch.Tensor | None, layout: ExpertLayout) -> torch.Tensor:
    """Gradient of each slot of each wire row, ``[n, K]`` float32; 0 where there is no row."""
    if row_weights is None:
        return torch.zeros_like(layout.slot_rows, dtype=torch.float32)
    behind = torch.cat([row_weights, row_weights.new_zeros(1)])  # which -1 stands for
    return behind[layout.slot_rows.long()]


def _token_sums(slots: torch.Tensor, plan: RoutePlan) -> torch.Tensor:
    """Sum ``[n, K]`` over each token's wire rows: ``[T, K]``.

    One rank has a slot, the others bring +0: the order does not matter.
    """
    counts = plan.place_offsets.diff()
    tokens = torch.arange(plan.num_tokens, device=slots.device)
    tokens = tokens.repeat_interleave(counts, output_size=plan.num_rows)
    sums = slots.new_zeros((plan.num_tokens, slots.shape[1]))
    return sums.index_add_(0, tokens, slots[plan.places.long()])


def _relay_sums(rows: torch.Tensor, relay: RelayPlan) -> torch.Tensor:
    """Sum the rows of slot gradients of each row that the relay had handed on, as bytes again."""
    slots = rows.view(torch.float32)
    sums = slots.new_zeros((relay.num_tokens, slots.shape[1]))
    return sums.index_add_(0, relay.row_tokens, slots).view(torch.uint8)


def _row_weights(layout: ExpertLayout) -> torch.Tensor | None:
    """Weight of each expert row as it came, ``[M]``; `layout.row_weights` may be changed since."""
    if layout.weights is None:
        return None
    rows = layout.weights.new_zeros(layout.num_expert_rows + 1)  # the last is what -1 stands for
    rows[layout.slot_rows.long().view(-1)] = layout.weights.view(-1)
    return rows[:-1]


def _keep_for_this_stream(plan: RoutePlan, layout: ExpertLayout, way: Way) -> None:
    """Tell the allocator that tables made on other streams are read on the current one."""
    for tables in (vars(plan).values(), vars(layout).values(), way.tables):
        for tensor in tables:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
