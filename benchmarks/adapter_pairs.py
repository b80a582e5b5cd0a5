"""Adapters and what they wrap, on the same tokens, for `bench_adapters.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from fp4comm import AllToAll
from fp4comm.integrations._common import transport_of

INNER = 64  # of Transformers' experts
NUM_TRANSFORMERS_EXPERTS = 16  # a rank: all of a model are made first


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Tokens of this rank."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    num_experts: int


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same through an adapter and by `AllToAll` directly: y of x and topk_weights."""

    adapter: str
    package: str
    a2a: AllToAll
    inputs: Inputs
    through: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    direct: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def inputs_of(rank: int, tokens: int, hidden: int, num_experts: int, topk: int) -> Inputs:
    """Draw tokens and routing; weights are powers of two, so that sums are exact in any order.

    Raises:
        ValueError: a token cannot have as many experts.
    """
    if topk > num_experts:
        raise ValueError(f"topk: expected at most {num_experts} (experts), got {topk}")
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    idx = torch.rand(tokens, num_experts, generator=g).topk(topk).indices.sort().values
    weights = torch.exp2(torch.randint(-3, 1, idx.shape, generator=g).float())
    return Inputs(x, idx, weights, num_experts)


def megatron(group: Any, inputs: Inputs, **options: Any) -> Pair:
    """Megatron-Core's hooks, in the order in which a MoELayer calls them."""
    from fp4comm.integrations.megatron import TokenDispatcher

    a2a = AllToAll(transport_of(group), arrive="bf16", expert_alignment=1, **options)
    own_group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    replaced = SimpleNamespace(
        config=SimpleNamespace(moe_router_topk=inputs.topk_idx.shape[1]),
        ep_group=group,
        tp_group=own_group,
        tp_ep_group=group,
    )
    dispatcher: Any = TokenDispatcher(replaced, a2a)
    shape = len(inputs.x), inputs.num_experts
    chosen = torch.zeros(shape, dtype=torch.bool, device=inputs.x.device)
    chosen.scatter_(1, inputs.topk_idx, True)

    def through(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # The router's; to make it is no work of a dispatcher.
        rows, probs = dispatcher.dispatch_preprocess(x, chosen, router(weights))
        rows, probs = dispatcher.token_dispatch(rows, probs)
        rows, _, _ = dispatcher.dispatch_postprocess(rows, probs)
        y = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        return dispatcher.combine_postprocess(y)

    def direct(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        router(weights)
        d = a2a.dispatch(x, inputs.topk_idx, weights)
        return a2a.combine(d.rows, d.handle, weighted=False)

    def router(weights: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(shape, device=weights.device)
        return zeros.scatter(1, inputs.topk_idx, weights)

    return Pair("Megatron-Core", "megatron-core", a2a, inputs, through, direct)


def torchtitan(group: Any, inputs: Inputs, **options: Any) -> Pair:
    """torchtitan's dispatcher, as its MoE block calls it."""
    from torch.distributed.device_mesh import DeviceMesh

    from fp4comm.integrations.torchtitan import TokenDispatcher

    config = TokenDispatcher.Config(
        top_k=inputs.topk_idx.shape[1],
        **{name: options.pop(name) for name in ("num_experts", "hidden", "precision")},
        options=options,
    )
    dispatcher = TokenDispatcher(config)
    dispatcher.wire_meshes(ep_mesh=DeviceMesh.from_group(group, inputs.x.device.type))
    a2a = dispatcher.a2a
    of_experts = torch.bincount(inputs.topk_idx.flatten(), minlength=inputs.num_experts)

    def through(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, _, handle = dispatcher.dispatch(x, weights, inputs.topk_idx, of_experts)
        assert rows is not None
        return dispatcher.combine(rows, handle, x)

    def direct(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = a2a.dispatch(x, inputs.topk_idx, weights)
        return a2a.combine(d.rows, d.handle)

    return Pair("torchtitan", "torchtitan", a2a, inputs, through, direct)


def transformers(group: Any, inputs: Inputs, **options: Any) -> Pair:
    """Transformers' experts function, around the experts of a Mixtral layer."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from fp4comm.integrations import transformers as adapter

    num_experts = NUM_TRANSFORMERS_EXPERTS * dist.get_world_size(group)
    config = MixtralConfig(
        hidden_size=options["hidden"], intermediate_size=INNER, num_local_experts=num_experts
    )
    torch.manual_seed(1)
    experts = MixtralExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model = torch.nn.ModuleList([experts.to(inputs.x.device, torch.bfloat16)])
    adapter.shard_experts(model, group, options["precision"])
    a2a, idx = experts._fp4comm, inputs.topk_idx % num_experts

    def through(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return experts(x, idx, weights)

    def direct(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = a2a.dispatch(x, idx, weights)
        return a2a.combine(adapter.apply_experts(experts, d), d.handle)

    of_pair = dataclasses.replace(inputs, topk_idx=idx, num_experts=num_experts)
    return Pair("Transformers", "transformers", a2a, of_pair, through, direct)


ADAPTERS: dict[str, Callable[..., Pair]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "transformers": transformers,
}
