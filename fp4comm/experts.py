"""A SwiGLU expert layer over `AllToAll` that keeps the packed wire rows for its backward pass.

    dispatch, packed -> rows -> gate, up -> silu(gate) * up * row_weights -> down -> combine
                      (FP8)    (product)                        (FP8)     (product)  unweighted

Forward, the wire rows become FP8 rows and are kept as they came: 4 bits an element in mxfp4, and
once a token, however many of its experts are here.  Backward rebuilds from them the FP8 columns
that the weight gradient multiplies.  The routing weights are applied before the down product, so
that combine keeps nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from fp4comm import autograd, check, products
from fp4comm.all_to_all import AllToAll
from fp4comm.dispatched import Dispatched
from fp4comm.eager import uncompiled
from fp4comm.products import Operand, Products
from fp4comm.routing import ExpertLayout

CACHES = ("packed", "bf16", "recompute")


@uncompiled
def swiglu(
    a2a: AllToAll,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    cache: str = "packed",
) -> torch.Tensor:
    """Send tokens to their experts, apply those, and sum the results at home; differentiable.

    Expert e gives ``down[e] @ (silu(gate) * up)`` with ``gate, up = gate_up[e] @ token``.  On a
    Hopper GPU, with CUDA 12.9 or newer, products are of FP8 if hidden, inner and the object's
    ``expert_alignment`` are multiples of 128; elsewhere in float32 of what the wire rows stand for.

    Args:
        a2a: of this layer; its ``arrive`` and ``scale_layout`` do not matter here.
        x: as for `AllToAll.dispatch`; gradients are of the BF16 it is sent as.
        topk_idx: likewise.
        topk_weights: likewise.
        gate_up: ``[local experts, 2 * inner, hidden]``, any float, gate before up; inner a
            multiple of 32.
        down: ``[local experts, hidden, inner]``.
        cache: what is kept for backward, beside ``2 * inner`` BF16 a row, the products that
            silu sees: ``"packed"``, the wire rows as they came; ``"bf16"``, expert rows in BF16;
            ``"recompute"``, the wire rows alone: backward makes those products once more.  Rows
            and results are the same in all three; so are gradients, but for FP8 columns of BF16
            rows, which have scales of their own.

    Returns:
        ``[T, hidden]`` bfloat16.

    Raises:
        ValueError, TypeError, RuntimeError: on all ranks alike, if one rank's arguments are wrong.
        TimeoutError: as for `AllToAll.dispatch`.

    Source: arXiv 2603.02731 for the cache and the columns.

    Example: one rank, two experts that double and halve.
        >>> import torch
        >>> from fp4comm import AllToAll, experts, transport
        >>> a2a = AllToAll(transport.open("local"), num_experts=2, hidden=32)
        >>> gate_up = torch.cat([torch.eye(32) * 100, torch.eye(32)]).repeat(2, 1, 1)
        >>> down = torch.stack([torch.eye(32) / 50, torch.eye(32) / 200])
        >>> y = experts.swiglu(a2a, torch.ones(1, 32).bfloat16(), torch.tensor([[0, 1]]),
        ...                    torch.tensor([[0.5, 0.5]]), gate_up, down)
        >>> round(y[0, 0].item(), 2)
        1.25
    """

    @contextlib.contextmanager
    def checks() -> Iterator[None]:
        autograd.check_inputs("bf16", x, topk_weights)
        _check_weights(a2a, gate_up, down, x)
        check.one_of("cache", cache, CACHES)
        yield

    d = a2a._dispatch(x, topk_idx, topk_weights, checks(), arrive="packed").wait()
    return a2a.combine(apply(a2a, d, gate_up, down, cache=cache), d.handle, weighted=False)


def apply(
    a2a: AllToAll,
    d: Dispatched,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    cache: str = "packed",
) -> torch.Tensor:
    """Apply the experts to packed rows that were dispatched; what `swiglu` does between exchanges.

    Args as there; the rows' gradient goes to ``d.rows``, which stands for them.

    Returns:
        ``[M, hidden]`` bfloat16, weighted: for `AllToAll.combine` with ``weighted=False``.
    """
    widths = a2a.hidden, gate_up.shape[1] // 2
    multiply = products.of(gate_up.device, widths, a2a.expert_alignment)
    options = Options(a2a, multiply, cache, d.handle.layout)
    arrived = Operand(d.packed, d.handle.layout)
    return SwiGLU.apply(d.rows, d.row_weights, gate_up, down, arrived, options)


@dataclasses.dataclass(frozen=True, eq=False)
class Options:
    """What the layer's function needs beside tensors."""

    a2a: AllToAll
    products: Products
    cache: str
    layout: ExpertLayout


class SwiGLU(torch.autograd.Function):
    """Expert rows to expert outputs; ``rows`` stands for the wire rows, which hold the values."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor | None,
        row_weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        arrived: Operand,
        options: Options,
    ) -> torch.Tensor:
        """Multiply, and keep what the cache is to hold."""
        layout, multiply = options.layout, options.products
        off = torch.autocast(gate_up.device.type, enabled=False)
        with options.a2a._stopping_peers("experts"), off:
            hidden = multiply.rows_times_weights(arrived, gate_up, layout).bfloat16()
            inner = _inner(hidden, row_weights)
            out = multiply.rows_times_weights(Operand.of(inner), down, layout).bfloat16()
            if options.cache == "bf16":
                arrived = Operand.of(arrived.packed.to_bf16(layout))
        ctx.options, ctx.arrived_without_tensors = options, arrived.replaced(*_empty(arrived))
        kept = () if options.cache == "recompute" else (hidden,)
        ctx.save_for_backward(*arrived.tensors(), row_weights, gate_up, down, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> autograd.Gradients:
        """Rebuild the operands, and multiply."""
        with torch.no_grad(), ctx.options.a2a._stopping_peers("experts backward"):
            found = _backward(ctx, gradients[0])
        return *autograd.differentiable_once(*found), None, None


def _backward(ctx: Any, grad_out: torch.Tensor) -> list[torch.Tensor | None]:
    layout, multiply = ctx.options.layout, ctx.options.products
    payload, scales, row_weights, gate_up, down, *kept = ctx.saved_tensors
    arrived = ctx.arrived_without_tensors.replaced(payload, scales)
    rows_want, row_weights_want, gate_up_wants, down_wants, *_ = ctx.needs_input_grad
    grads: list[torch.Tensor | None] = [None] * 4
    with torch.autocast(gate_up.device.type, enabled=False):
        [hidden] = kept or [multiply.rows_times_weights(arrived, gate_up, layout).bfloat16()]
        grad = Operand.of(grad_out)
        if down_wants:
            inner = Operand.of(_inner(hidden, row_weights))
            grads[3] = _stacked(multiply.weight_gradients(grad, inner, layout), down)
        grad_inner = multiply.rows_times_weights(grad, down.transpose(1, 2), layout)
        grad_hidden, grad_row_weights = _swiglu_gradients(hidden, row_weights, grad_inner)
        grads[1] = grad_row_weights if row_weights_want else None
        grad = Operand.of(grad_hidden)
        if gate_up_wants:
            grads[2] = _stacked(multiply.weight_gradients(grad, arrived, layout), gate_up)
        if rows_want:
            rows = multiply.rows_times_weights(grad, gate_up.transpose(1, 2), layout)
            grads[0] = rows.bfloat16()
    return grads


def _inner(hidden: torch.Tensor, row_weights: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up * row_weights`` in float32: ``[M, 2 * inner]`` to ``[M, inner]``."""
    gate, up = hidden.float().chunk(2, dim=-1)
    return F.silu(gate).mul_(up).mul_(row_weights[:, None])


def _swiglu_gradients(
    hidden: torch.Tensor, row_weights: torch.Tensor, grad_inner: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `_inner`: of gate and up ``[M, 2 * inner]``, and of the row weights ``[M]``."""
    gate, up = hidden.float().chunk(2, dim=-1)
    sigmoid, grad = gate.sigmoid(), grad_inner.float()
    silu = gate * sigmoid
    grad_row_weights = (grad * silu).mul_(up).sum(dim=-1)
    grad = grad * row_weights[:, None]
    grad_up = grad * silu
    grad_gate = grad.mul_(up).mul_(sigmoid).mul_(1 + gate - silu)  # silu' = s (1 + g - g s)
    return torch.cat([grad_gate, grad_up], dim=-1), grad_row_weights


def _stacked(gradients: Any, weights: torch.Tensor) -> torch.Tensor:
    """Put gradients of single experts together, in the dtype of the weights."""
    stacked = torch.zeros_like(weights, memory_format=torch.contiguous_format)
    for expert, gradient in enumerate(gradients):
        if gradient is not None:
            stacked[expert] = gradient
    return stacked


def _empty(operand: Operand) -> tuple[torch.Tensor, ...]:
    return tuple(t.new_empty((0, t.shape[1])) for t in operand.tensors())


def _check_weights(a2a: AllToAll, gate_up: Any, down: Any, x: Any) -> None:
    num_local = a2a._placement.num_local_experts(a2a._transport.rank)
    for name, weights in (("gate_up", gate_up), ("down", down)):
        if not isinstance(weights, torch.Tensor):
            raise TypeError(f"{name}: expected a torch tensor, got {type(weights).__name__}")
        check.weight_dtype(name, weights)
        if weights.dim() != 3:
            raise ValueError(f"{name}: expected 3 dimensions, got {weights.dim()}")
        if isinstance(x, torch.Tensor) and weights.device != x.device:
            raise ValueError(f"{name}: expected on {x.device} as x, got {weights.device}")
    inner = down.shape[-1]
    expected = {
        "gate_up": (gate_up, (num_local, 2 * inner, a2a.hidden)),
        "down": (down, (num_local, a2a.hidden, inner)),
    }
    for name, (weights, shape) in expected.items():
        if tuple(weights.shape) != shape:
            raise ValueError(
                f"{name}: expected shape {list(shape)} ({num_local} experts here, hidden"
                f" {a2a.hidden}, inner {inner}), got {list(weights.shape)}"
            )
    if inner % check.MX_BLOCK or not inner:
        raise ValueError(f"down: expected inner to be a multiple of {check.MX_BLOCK}, got {inner}")
