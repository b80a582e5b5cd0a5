"""Hugging Face Transformers: a model's experts spread over ranks, by experts function "fp4comm".

    router (the model's own) -> dispatch -> this rank's experts -> combine

Importing this module registers the function.  Each rank runs the model on a batch of its own; in
each MoE layer tokens go to the ranks of their experts, which is collective, forward and backward.

Run with transformers 5.24.0 and 5.20.2, torch 2.13.0 and gloo on CPU ranks: Mixtral, Qwen3-MoE,
DeepSeek-V3, gpt-oss (biases, transposed weights, a gate of its own), and experts without a gate
(Nemotron-H); Mixtral's experts on two H200 too.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F

from fp4comm import agreement
from fp4comm.all_to_all import AllToAll
from fp4comm.dispatched import Dispatched
from fp4comm.integrations._common import transport_of
from fp4comm.precision import Precision
from fp4comm.routing import Placement

NAME = "fp4comm"
SUPPORTED = (
    "supported are releases with transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS, run with 5.20"
    " and 5.24"
)

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError(
        f"transformers: {error}; {SUPPORTED}: pip install 'transformers>=5.20'"
    ) from error

# What the hook notes in each experts module that has it.
HOOK_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def shard_experts(
    model: torch.nn.Module,
    group: Any = None,
    precision: Precision = Precision(),  # noqa: B008  frozen
    *,
    timeout_s: float = 300.0,
    **route: Any,
) -> torch.nn.Module:
    """Keep this rank's experts of each MoE layer, and send tokens to those of the others.

    Of E experts over R ranks each rank keeps a contiguous range, the first ``E % R`` ranks one
    more, with the experts implementation "fp4comm" whatever the model's config says, which other
    models may share.  Changes the model, whose other parameters have to be the same on all ranks.
    Collective over the group.  Make the optimizer afterwards: experts are new parameters.

    Training: experts get the gradients of all ranks' losses together; other parameters that of this
    rank's loss, as without experts elsewhere.  To take means, average the latter over the ranks
    (DistributedDataParallel does, with `expert_parameters` ignored) and divide the former by R.

    Generation: every rank has to take part until the last one is done, so pass ``synced_gpus=True``
    to ``generate``; it asks all ranks of WORLD.  Saved checkpoints hold this rank's experts alone;
    save ``state_dict()``, since the whole model cannot be pickled.

    Args:
        model: with experts that have Transformers' experts hook; its activations BF16, or under
            autocast.
        group: torch.distributed ProcessGroup; None is WORLD; or a transport of fp4comm.
        precision: wire format of each pass and direction.
        timeout_s: seconds that a layer waits for a rank.
        route: ``route``, ``ranks_per_node`` and ``links`` of `AllToAll`.

    Returns:
        the model.

    Raises:
        ValueError, TypeError: no experts with the hook; experts that are quantized, on a device
            mesh (tensor or expert parallelism of Transformers) or sharded already; a hidden size
            that is no multiple of 32.
    """
    transport = transport_of(group, timeout_s)
    found = {name: m for name, m in model.named_modules() if _has_hook(m)}
    shapes = agreement.make_on_all(transport, lambda: _check_model(model, found))
    made = {
        (num_experts, hidden): AllToAll(
            transport,
            num_experts=num_experts,
            hidden=hidden,
            precision=precision,
            arrive="bf16",
            expert_alignment=1,
            timeout_s=timeout_s,
            **route,
        )
        for num_experts, hidden in dict.fromkeys(shapes.values())
    }
    kept: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for name, module in found.items():
        _shard(module, made[shapes[name]], transport.rank, kept)
    return model


def expert_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return this rank's parameters of a sharded model's experts, by their names in the model."""
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in model.named_modules()
        if hasattr(module, "_fp4comm")
        for name, parameter in _of_experts(module).items()
    }


def experts_forward(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Send tokens to their experts and sum the results: Transformers' experts function.

    Args:
        module: sharded experts.
        hidden_states: ``[T, hidden]``.
        top_k_index: ``[T, K]`` expert of all ranks; num_experts for none.
        top_k_weights: ``[T, K]``.

    Returns:
        ``[T, hidden]`` in the dtype of hidden_states.

    Raises:
        RuntimeError: the experts are not sharded.
        ValueError, TypeError, TimeoutError: as `AllToAll.dispatch`.
    """
    a2a = getattr(module, "_fp4comm", None)
    if a2a is None:
        raise RuntimeError(
            "experts: expected shard_experts(model, group) of fp4comm.integrations.transformers"
            f' before the first forward pass with experts implementation "{NAME}"'
        )
    idx = torch.where(top_k_index == a2a.num_experts, -1, top_k_index).to(top_k_index.dtype)
    d = a2a.dispatch(hidden_states, idx, top_k_weights)
    out = apply_experts(module, d)
    return a2a.combine(out, d.handle).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def apply_experts(module: Any, d: Dispatched) -> torch.Tensor:
    """Apply this rank's experts to the rows that arrived, as the model's own functions would."""
    assert d.rows is not None  # they arrive in BF16
    out = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", d.rows, d)
    out = module._apply_gate(out) if module.has_gate else module.act_fn(out)
    out = _linear(module, "down_proj", out, d)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    return out.to(torch.bfloat16)


def _linear(module: Any, name: str, rows: torch.Tensor, d: Dispatched) -> torch.Tensor:
    """Multiply each expert's rows by its weight, and add its bias."""
    rows = rows.to(torch.bfloat16)
    weight = getattr(module, name).to(rows.dtype)  # a copy only of other dtypes, as autocast makes
    if not module.is_transposed:
        weight = weight.transpose(1, 2)
    multiply = grouped_product if _has_grouped_mm(rows, weight) else product_by_expert
    out = multiply(rows, weight, d)
    if module.has_bias:
        bias = getattr(module, f"{name}_bias").to(rows.dtype)
        out = out + bias.repeat_interleave(d.num_rows, dim=0, output_size=len(out))
    return out


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, d: Dispatched) -> torch.Tensor:
    """Multiply ``[M, in]`` by ``[experts, in, out]``, in one call."""
    return F.grouped_mm(rows, weight, offs=d.expert_offsets[1:].int())


def product_by_expert(rows: torch.Tensor, weight: torch.Tensor, d: Dispatched) -> torch.Tensor:
    """Multiply ``[M, in]`` by ``[experts, in, out]``, expert by expert."""
    parts = [part @ w for part, w in zip(rows.split(d.num_rows_list), weight, strict=True)]
    return torch.cat([rows.new_empty(0, weight.shape[2]), *parts])


def _has_grouped_mm(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Say whether torch has it for these: BF16 rows of a multiple of 16 bytes."""
    if not hasattr(F, "grouped_mm") or not rows.numel() or not weight.numel():
        return False
    if weight.shape[1] % 8 or weight.shape[2] % 8:
        return False
    return not rows.is_cuda or torch.cuda.get_device_capability(rows.device) >= (8, 0)


def _has_hook(module: torch.nn.Module) -> bool:
    return all(hasattr(module, name) for name in (*HOOK_ATTRIBUTES, "down_proj", "config"))


def _check_model(
    model: torch.nn.Module, found: dict[str, torch.nn.Module]
) -> dict[str, tuple[int, int]]:
    """Return experts and hidden of each layer, or say why the model cannot be sharded."""
    if not found:
        raise ValueError(
            f"model: expected experts with Transformers' experts hook, got {type(model).__name__}"
            f" without ({SUPPORTED}, and models whose experts use it)"
        )
    return {name: _check_experts(name, module) for name, module in found.items()}


def _check_experts(name: str, module: Any) -> tuple[int, int]:
    """Return experts and hidden of a layer, or say why it cannot be sharded."""
    if hasattr(module, "_fp4comm"):
        raise ValueError(f"model: expected whole experts, got {name} sharded already")
    num_experts = module.down_proj.shape[0]
    for of_experts, parameter in module.named_parameters(prefix=name, recurse=False):
        is_on_mesh = hasattr(parameter, "device_mesh")
        if is_on_mesh or getattr(module, "_is_expert_parallel", False):
            raise ValueError(
                f"model: expected whole experts, got {of_experts} on a device mesh (load it without"
                " tensor parallelism and without an expert-parallel plan)"
            )
        if parameter.dtype not in DTYPES:
            raise TypeError(
                f"model: expected experts in bfloat16, float32 or float16, got {of_experts} in"
                f" {parameter.dtype} (quantized experts have functions of their own)"
            )
        if not parameter.dim() or parameter.shape[0] != num_experts:
            raise ValueError(
                f"model: expected {num_experts} experts in the first dimension of {of_experts}, got"
                f" shape {list(parameter.shape)}"
            )
    return num_experts, module.down_proj.shape[2 if module.is_transposed else 1]


def _of_experts(module: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters with an entry for each expert; those of submodules all experts share."""
    return dict(module.named_parameters(recurse=False))


def _shard(
    module: Any, a2a: AllToAll, rank: int, kept: dict[torch.nn.Parameter, torch.nn.Parameter]
) -> None:
    """Keep this rank's experts, and the way to the others; layers that share weights still do."""
    own = Placement(a2a.num_experts, a2a._transport.num_ranks).experts(rank)
    for name, whole in _of_experts(module).items():
        if whole not in kept:
            share = whole.detach()[own.start : own.stop].clone()
            kept[whole] = torch.nn.Parameter(share, requires_grad=whole.requires_grad)
        setattr(module, name, kept[whole])
    module._fp4comm = a2a
    module.config = copy.deepcopy(module.config)  # that nobody shares
    module.config._experts_implementation = NAME
