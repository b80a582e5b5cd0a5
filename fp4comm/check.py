"""Argument checks.  Each raises ValueError or TypeError as ``argument: expected X, got Y``."""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch.autograd import forward_ad

from fp4comm import gpu
from fp4comm.formats import FP8_BLOCK, MX_BLOCK

MAX_INT32 = 2**31 - 1
MAX_LOCAL_EXPERTS = 2**15 - 1  # the route carries local experts as int16

BLOCK_REASON = "(an MX block has 32 elements)"
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # or an FP8 pair (codes, scales)


def hidden(value: int) -> int:
    """Check the hidden size."""
    value = positive_int("hidden", value)
    if value % MX_BLOCK:
        raise ValueError(f"hidden: expected a multiple of {MX_BLOCK}, got {value} {BLOCK_REASON}")
    return value


def positive_int(name: str, value: int) -> int:
    """Check a count that must be at least 1; integers of other libraries are fine."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if operator.index(value) < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    if operator.index(value) > MAX_INT32:
        raise ValueError(f"{name}: expected at most {MAX_INT32}, got {value}")
    return operator.index(value)


def local_experts(name: str, num_experts: int, num_ranks: int) -> None:
    """Check that the route can tell the experts of a rank apart."""
    if num_experts > num_ranks * MAX_LOCAL_EXPERTS:
        raise ValueError(
            f"{name}: expected at most {MAX_LOCAL_EXPERTS} a rank ({num_ranks} ranks), got"
            f" {num_experts}"
        )


def seconds(name: str, value: float) -> None:
    """Check a time limit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number of seconds, got {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{name}: expected more than 0 seconds, got {value}")
    if isinstance(value, int) and value > sys.float_info.max:
        raise ValueError(f"{name}: expected what a float can hold, got {value.bit_length()} bits")


def layout(value: Any, num_rows: int, device: torch.device) -> None:
    """Check that a layout is one, of this many wire rows on this device."""
    if not hasattr(value, "slot_rows"):
        raise TypeError(f"layout: expected the layout of a Handle, got {type(value).__name__}")
    got = value.slot_rows.shape[0]
    if got != num_rows:
        raise ValueError(f"layout: expected one of {num_rows} wire rows, got {got}")
    if value.slot_rows.device != device:
        raise ValueError(f"layout: expected on {device} as the rows, got {value.slot_rows.device}")


def transport(value: Any) -> None:
    """Check that this can be a transport."""
    if not all(hasattr(value, name) for name in ("rank", "num_ranks", "exchange_counts")):
        raise TypeError(
            f"transport: expected one from fp4comm.transport.open, got {type(value).__name__}"
        )


def one_of(name: str, value: str, options: tuple[str, ...]) -> None:
    """Check a choice."""
    if value not in options:
        raise ValueError(f"{name}: expected one of {', '.join(options)}, got {value!r}")


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """Take a torch tensor, or an array of another library through DLPack.

    Raises:
        TypeError: neither.
    """
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise TypeError(f"{name}: expected a dense tensor, got a {value.layout} one")
        return value.resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value
    if hasattr(value, "__dlpack__"):
        strides = getattr(value, "strides", None)
        if isinstance(strides, tuple) and any(stride < 0 for stride in strides):
            value = value.copy()  # torch would end the process
        try:
            return torch.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:
            raise TypeError(
                f"{name}: expected an array that DLPack can hand over ({error})"
            ) from error
    raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")


def rows(
    name: str,
    x: Any,
    supported: tuple[torch.dtype, ...],
    hidden_size: int | None = None,
    otherwise: str = "",
) -> torch.Tensor:
    """Check rows ``[T, hidden]`` of a supported dtype.

    Args:
        name: what error texts call them.
        x: a tensor, or what can become one.
        supported: dtypes.
        hidden_size: which they have to have; None: any.
        otherwise: what else is taken, for the error text.

    Returns:
        a contiguous tensor, detached.
    """
    tensor = as_tensor(name, x)
    if tensor.dtype not in supported:
        raise TypeError(
            f"{name}: expected {_names(supported)}{otherwise}, got {_name(tensor.dtype)}"
        )
    _row_shape(name, tensor, hidden_size)
    return _plain(tensor)


def rows_or_pair(
    name: str, x: Any, supported: tuple[torch.dtype, ...], hidden_size: int | None = None
) -> Rows:
    """Check rows ``[T, hidden]``: a tensor of a supported dtype, or an FP8 pair (codes, scales).

    Returns:
        contiguous tensors, detached.
    """
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise TypeError(
                f"{name}: expected a tensor or a pair (codes, scales), got {len(x)} items"
            )
        return _fp8_pair(
            name, as_tensor(name, x[0]), as_tensor(f"{name} scales", x[1]), hidden_size
        )
    pair = " or an FP8 pair (float8_e4m3fn codes, float32 scales)"
    return rows(name, x, supported, hidden_size, pair)


def codes(value: Rows) -> torch.Tensor:
    """Return the elements of rows ``[T, hidden]``: the codes of an FP8 pair."""
    return value[0] if isinstance(value, tuple) else value


def _fp8_pair(
    name: str, codes: torch.Tensor, scales: torch.Tensor, hidden_size: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if codes.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32:
        raise TypeError(
            f"{name}: expected a pair of float8_e4m3fn codes and float32 scales, got"
            f" {_name(codes.dtype)} and {_name(scales.dtype)}"
        )
    _row_shape(name, codes, hidden_size)
    expected = (codes.shape[0], -(-codes.shape[1] // FP8_BLOCK))
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"{name} scales: expected shape {list(expected)} (one for {FP8_BLOCK} elements), got"
            f" {list(scales.shape)}"
        )
    if codes.device != scales.device:
        raise ValueError(
            f"{name} scales: expected on {codes.device} as the codes, got {scales.device}"
        )
    return _plain(codes), _plain(scales)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Take it out of its graph, and make it contiguous; each only if need be."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _row_shape(name: str, tensor: torch.Tensor, hidden_size: int | None) -> None:
    if tensor.dim() != 2:
        raise ValueError(f"{name}: expected shape [tokens, hidden], got {list(tensor.shape)}")
    got = tensor.shape[1]
    if hidden_size is not None and got != hidden_size:
        raise ValueError(f"{name}: expected hidden {hidden_size}, got {got}")
    if got < 1 or got % MX_BLOCK:
        raise ValueError(
            f"{name}: expected hidden to be a multiple of {MX_BLOCK}, got {got} {BLOCK_REASON}"
        )


def topk_idx(value: Any, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Check expert indices ``[T, K]``: int32 or int64.  `expert_range` checks their values."""
    idx = as_tensor("topk_idx", value)
    if idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_idx: expected int32 or int64, got {_name(idx.dtype)}")
    if idx.dim() != 2 or idx.shape[0] != num_tokens or idx.shape[1] < 1:
        raise ValueError(
            f"topk_idx: expected shape [{num_tokens}, K] with K >= 1 ({num_tokens} tokens in x),"
            f" got {list(idx.shape)}"
        )
    if idx.device != device:
        raise ValueError(f"topk_idx: expected on {device} as x, got {idx.device}")
    return _plain(idx)


def expert_range(idx: torch.Tensor, num_experts: int) -> None:
    """Check that expert indices ``[T, K]`` on the host are -1 or an expert."""
    if idx.numel() and not (int(idx.min()) >= -1 and int(idx.max()) < num_experts):
        wrong = torch.nonzero((idx < -1).view(-1) | (idx >= num_experts).view(-1))
        raise wrong_expert(idx, int(wrong[0]), num_experts)


def wrong_expert(idx: torch.Tensor, at: int, num_experts: int) -> ValueError:
    """Make the error for an index that is no expert, the flat ``at``-th of ``[T, K]``."""
    token, slot = divmod(at, idx.shape[1])
    return ValueError(
        f"topk_idx: expected values in -1..{num_experts - 1} ({num_experts} experts), got"
        f" {int(idx[token, slot])} at {[token, slot]}"
    )


def weight_dtype(name: str, weights: torch.Tensor) -> None:
    """Check the type of weights, of routing or of experts."""
    if weights.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"{name}: expected {_names(WEIGHT_DTYPES)}, got {_name(weights.dtype)}")


def topk_weights(value: Any, idx: torch.Tensor) -> torch.Tensor:
    """Check routing weights ``[T, K]``, any float; computed in float32."""
    weights = as_tensor("topk_weights", value)
    weight_dtype("topk_weights", weights)
    if weights.shape != idx.shape:
        raise ValueError(
            f"topk_weights: expected shape {list(idx.shape)} as topk_idx, got {list(weights.shape)}"
        )
    if weights.device != idx.device:
        raise ValueError(f"topk_weights: expected on {idx.device} as x, got {weights.device}")
    return _plain(weights).to(torch.float32)


def expert_out(
    value: Any,
    num_rows: int,
    hidden_size: int,
    device: torch.device,
    name: str = "expert_out",
    like: str = "rows",
) -> torch.Tensor:
    """Check expert outputs ``[M, hidden]`` bfloat16, as many as what dispatch gave of ``like``."""
    out = as_tensor(name, value)
    if out.dtype != torch.bfloat16:
        raise TypeError(f"{name}: expected bfloat16, got {_name(out.dtype)}")
    if tuple(out.shape) != (num_rows, hidden_size):
        raise ValueError(
            f"{name}: expected shape [{num_rows}, {hidden_size}] as the {like} of dispatch, got"
            f" {list(out.shape)}"
        )
    if out.device != device:
        raise ValueError(f"{name}: expected on {device} as x of dispatch, got {out.device}")
    return _plain(out)


def out(name: str, value: Any, shape: tuple[int, int], device: torch.device) -> None:
    """Check a contiguous bfloat16 tensor that a result is written to."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.bfloat16:
        got = _name(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"{name}: expected a bfloat16 tensor, got {got}")
    if tuple(value.shape) != shape or not value.is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous with shape {list(shape)}, got {list(value.shape)} with"
            f" strides {list(value.stride())}"
        )
    if value.device != device:
        raise ValueError(f"{name}: expected on {device} as x of dispatch, got {value.device}")
    if past := value.data_ptr() % gpu.ALIGNMENT:
        raise ValueError(
            f"{name}: expected at a multiple of {gpu.ALIGNMENT} bytes, got {past} past one"
        )


def wants_gradient(*tensors: Any) -> bool:
    """Say whether gradients are enabled and one of these requires one."""
    return torch.is_grad_enabled() and any(
        isinstance(t, torch.Tensor) and t.requires_grad for t in tensors
    )


def no_tangent(name: str, *tensors: Any) -> None:
    """Refuse inputs of forward-mode differentiation: their tangents would be lost.

    Raises:
        RuntimeError: one of the tensors has a tangent.
    """
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"{name}: expected a tensor without tangent, got one of forward-mode"
                " differentiation (only backward passes are there)"
            )


def no_inference(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor of inference mode where a gradient is wanted: autograd cannot keep it.

    Raises:
        RuntimeError: it is one.
    """
    if tensor.is_inference():
        raise RuntimeError(
            f"{name}: expected one made outside of torch.inference_mode(), since a gradient is"
            " wanted"
        )


def no_gradient(name: str, *tensors: Any, reason: str) -> None:
    """Refuse inputs that want a gradient: none would come.

    Raises:
        RuntimeError: gradients are enabled and one of the tensors requires one.
    """
    if wants_gradient(*tensors):
        raise RuntimeError(
            f"{name}: expected no gradient to be wanted, got requires_grad=True ({reason}; use"
            " torch.no_grad() or detach() where none is needed)"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(_name(d) for d in dtypes)
