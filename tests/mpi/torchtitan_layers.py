"""torchtitan's MoE block with fp4comm's dispatcher: torchtitan_layers.py DEVICE EP_SIZE...

Each rank compares it with the block that has all experts on one rank, and with torchtitan's own
all-to-all dispatcher.
"""

import dataclasses
import itertools
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import conformance
import spmd_types as spmd
import torch
import torch.distributed as dist
from framework_layers import close_rows, equal_rows, start_ranks
from spmd_types.checker import typecheck
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.spmd_types import set_spmd_meshes
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.config_utils import (
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.token_dispatcher import TorchAOTokenDispatcher
from transport_cases import raises

DEVICE = sys.argv[1]
NUM_EXPERTS, TOPK, HIDDEN, INNER = 8, 3, 64, 96
OVERRIDE = "fp4comm.integrations.torchtitan.dispatcher"
BACKENDS = "spmd_types", "partial_dtensor"
EXACT = {"dispatch": "bf16", "combine_grad": "bf16"}
LAYOUT = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}


class KnownExperts(GroupedExperts):
    """Apply ``expert(rows, expert_id)``."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, rows, num_rows):
        counts = num_rows.tolist()
        assert sum(counts) == len(rows)
        parts = [self.expert(part, self.first + e) for e, part in enumerate(rows.split(counts))]
        return torch.cat(parts)


def config_of_block(**options):
    """Config of the block; with options, the override of fp4comm is applied to it."""
    normal = partial(torch.nn.init.normal_, std=0.2)
    config = make_moe_config(
        num_experts=NUM_EXPERTS,
        routed_experts=make_routed_experts_config(
            dim=HIDDEN,
            hidden_dim=INNER,
            num_experts=NUM_EXPERTS,
            top_k=TOPK,
            param_init=dict.fromkeys(LAYOUT, normal),
            comm_backend="standard",
        ),
        router=make_router_config(
            dim=HIDDEN,
            num_experts=NUM_EXPERTS,
            gate_param_init={"weight": normal},
            top_k=TOPK,
        ),
        load_balance_coeff=None,
    )
    if options:
        apply_overrides(OverrideConfig(imports=[(OVERRIDE, options)]), config)
        assert type(config.routed_experts.token_dispatcher).__module__.startswith("fp4comm")
    return config


def make_block(dims, **options):
    """Make the block with the same weights on all ranks, then take this rank's share of them."""
    config = config_of_block(**options)
    if dims is not None:
        set_moe_sharding_config(config, enable_ep=True, enable_sp=False, expert_param_layout=LAYOUT)
    torch.manual_seed(1)
    block = config.build()
    block.init_states()
    block.to(DEVICE, torch.bfloat16)
    if dims is not None:
        block.parallelize(dims)
    return block


def step(block, x, dy, run=None):
    """Run a step; return y, the gradients of x and of the gate, and those of the experts."""
    block.zero_grad()
    x = x.clone().requires_grad_()
    y = (run or block)(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    y.backward(dy)
    experts = block.routed_experts.inner_experts
    weights = [block.router.gate.weight, *(getattr(experts, name) for name in LAYOUT)]
    gradients = [getattr(w.grad, "_local_tensor", w.grad) for w in weights]
    return [t.detach().flatten(0, -2) for t in (y, x.grad, *gradients)]


def tokens(num=13):
    """Make this rank's tokens ``[2, L, hidden]`` and a gradient; all ranks have equally many."""
    g = torch.Generator().manual_seed(dist.get_rank())
    shape = 2, 2, num, HIDDEN
    return torch.randn(shape, generator=g).bfloat16().to(DEVICE).unbind()


def has_its_own(dims):
    """Say whether torchtitan's own dispatcher can be run here, to be compared too."""
    if not hasattr(torch.compiler, "_is_non_strict_tracing"):  # which it asks; PyTorch 2.11 has not
        return False
    # With SPMD types it uses a collective that gloo has for equal splits alone.
    return dims.spmd_backend != "spmd_types" or dist.get_backend() != "gloo"


def check_equal(dims, group):
    """With the bf16 wire, forward and gradients are those of one rank, but for BF16 roundings."""
    x, dy = tokens()
    want = step(make_block(None), x, dy)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for i, gradient in enumerate(want[3:], 3):
        dist.all_reduce(gradient, group=group)
        want[i] = gradient.chunk(size)[rank]
    ours = [EXACT, EXACT | {"expert_alignment": 16}]
    for options in ours + ([{}] if has_its_own(dims) else []):
        got = step(make_block(dims, **options), x, dy)
        for mine, of_whole in zip(got, want, strict=True):
            close_rows(mine, of_whole)


def save_products(ctx, op, *args, **kwargs):
    products = torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def check_recomputed(dims):
    """Activation checkpointing, of all or of what is no product, changes nothing."""
    x, dy = tokens()
    block = make_block(dims, dispatch="mxfp4")
    want = step(block, x, dy)
    selective = partial(create_selective_checkpoint_contexts, save_products)
    for options in ({}, {"context_fn": selective}):
        again = partial(checkpoint, block, use_reentrant=False, **options)
        for got, expected in zip(step(block, x, dy, again), want, strict=True):
            equal_rows(got, expected)


def check_contract(dims, group, **options):
    """The conformance test of all adapters, with experts that it knows."""
    config = config_of_block(dispatch="mxfp4", **options).routed_experts
    known = KnownExperts.Config(dim=HIDDEN, hidden_dim=INNER, num_experts=NUM_EXPERTS)
    routed = dataclasses.replace(config, inner_experts=known).build()
    assert isinstance(routed, RoutedExperts)
    routed.parallelize(dims)
    t = SimpleNamespace(rank=dist.get_rank(group), num_ranks=dist.get_world_size(group))
    routed.inner_experts.first = NUM_EXPERTS // t.num_ranks * t.rank

    def moe(x, idx, weights, expert):
        routed.inner_experts.expert = expert
        counts = torch.bincount(idx[idx >= 0], minlength=NUM_EXPERTS)
        return routed(x[None], weights[None], idx[None], counts)[0]

    conformance.check(
        moe,
        t,
        num_experts=NUM_EXPERTS,
        hidden=HIDDEN,
        trains=True,
        device=DEVICE,
        num_random=8,
    )


def check_padding_of_torchao():
    """The alignment of quantized experts becomes that of the segments."""
    config = config_of_block()
    config.routed_experts.token_dispatcher = TorchAOTokenDispatcher.Config(
        num_experts=NUM_EXPERTS, top_k=TOPK, pad_multiple=32
    )
    apply_overrides(OverrideConfig(imports=[OVERRIDE]), config)
    assert config.routed_experts.token_dispatcher.expert_alignment == 32


def check_mistakes():
    with raises(TypeError, "unexpected keyword argument 'wire'"):
        config_of_block(wire="mxfp4")
    with raises(ValueError, "mxfp5"):
        config_of_block(dispatch="mxfp5")
    with raises(ValueError, "token_dispatcher: expected AllToAllTokenDispatcher.Config"):
        config = config_of_block(dispatch="mxfp4")
        apply_overrides(OverrideConfig(imports=[OVERRIDE]), config)
    block = config_of_block(dispatch="mxfp4").build()
    with raises(ValueError, "expert_parallel_degree: expected more than 1"):
        block.routed_experts.token_dispatcher.wire_meshes(ep_mesh=None)
    with typecheck(local=False), raises(RuntimeError, "debug.spmd_typechecking: expected False"):
        block.routed_experts.token_dispatcher.dispatch(None, None, None, None)


def main(ep_sizes):
    start_ranks(DEVICE)
    if DEVICE == "cpu":
        parallel_dims.device_type = "cpu"  # without an accelerator torchtitan takes "cuda"
    check_padding_of_torchao()
    check_mistakes()
    for ep_size, backend in itertools.product(map(int, ep_sizes), BACKENDS):
        dims = ParallelDims(1, -1, 1, 1, 1, ep_size, dist.get_world_size(), backend)
        dims.build_mesh()
        set_spmd_backend(backend)
        if backend == "spmd_types":
            set_spmd_meshes(dense_mesh=dims.spmd_dense_mesh(), sparse_mesh=dims.spmd_sparse_mesh())
        group = dims.get_mesh("ep").get_group()
        check_equal(dims, group)
        check_recomputed(dims)
        if backend == BACKENDS[0]:
            check_contract(dims, group)
            check_contract(dims, group, expert_alignment=16)
        print(f"rank {dist.get_rank()}: {ep_size} right with {backend}", flush=True)


if __name__ == "__main__":
    main(sys.argv[2:])
