"""MoE layers of Megatron-Core with fp4comm's dispatcher: megatron_layers.py DEVICE EP_SIZE...

Each rank compares them with the layer that has all experts on one rank, and on a GPU also with
Megatron's own all-to-all dispatcher.
"""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import conformance
import torch
import torch.distributed as dist
import torch.nn.functional as F
from framework_layers import close_rows, equal_rows, start_ranks
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from transport_cases import raises

from fp4comm import Precision, experts
from fp4comm.integrations import megatron

DEVICE = sys.argv[1]
NUM_EXPERTS, TOPK, HIDDEN, INNER = 8, 3, 64, 96
EXACT = Precision(dispatch="bf16", combine_grad="bf16")


class Router(TopKRouter):
    """Megatron's, but for the product: that one wants Transformer Engine and a GPU."""

    def gating(self, input):
        return F.linear(input.float(), self.weight.float())


class GivenRouter(torch.nn.Module):
    """Routes as the test says, whatever the tokens are."""

    def __init__(self, config, pg_collection):
        super().__init__()

    def forward(self, hidden_states, padding_mask=None):
        return self.probs, self.routing_map


class KnownExperts(torch.nn.Module):
    """Apply ``expert(rows, expert_id)`` and the probabilities, as Megatron's experts do."""

    def __init__(self, num_local_experts, config, pg_collection):
        super().__init__()
        self.first = dist.get_rank(pg_collection.ep) * num_local_experts

    def forward(self, rows, tokens_per_expert, probs):
        if isinstance(rows, tuple):
            codes, scales = rows
            values = codes.float() * scales.repeat_interleave(128, 1)[:, :HIDDEN]
            rows = values.bfloat16()
        counts = tokens_per_expert.tolist()
        assert sum(counts) == len(rows) == len(probs)
        parts = [self.expert(part, self.first + e) for e, part in enumerate(rows.split(counts))]
        return (torch.cat(parts) * probs[:, None]).to(rows.dtype), None


def config_of(ep_size, **changed):
    return TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": HIDDEN,
            "num_attention_heads": 2,
            "num_moe_experts": NUM_EXPERTS,
            "moe_router_topk": TOPK,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_ffn_hidden_size": INNER,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "expert_model_parallel_size": ep_size,
            "use_cpu_initialization": True,
            **changed,
        }
    )


def make_layer(groups, submodules=None, **changed):
    """Make a MoELayer, on the CPU with what works there: "allgather" needs no CUDA stream."""
    torch.manual_seed(1)
    if submodules is None:
        submodules = get_moe_module_spec(use_te=False, num_experts=NUM_EXPERTS).submodules
        submodules.router = Router
    config = config_of(dist.get_world_size(groups.ep), **changed)
    return MoELayer(config, submodules, layer_number=1, pg_collection=groups).to(DEVICE)


def groups_alone():
    """Groups of this rank alone, in which a layer has all experts."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    names = "ep", "tp", "cp", "expt_tp", "expt_dp", "tp_ep", "tp_cp", "tp_dp_cp"
    return ProcessGroupCollection(**dict.fromkeys(names, alone))


def local_experts(groups):
    num_local = NUM_EXPERTS // dist.get_world_size(groups.ep)
    return range(NUM_EXPERTS)[dist.get_rank(groups.ep) * num_local :][:num_local]


def copy_weights(whole, layer, groups):
    layer.router.load_state_dict(whole.router.state_dict())
    for mine, e in zip(layer.experts.local_experts, local_experts(groups), strict=True):
        mine.load_state_dict(whole.experts.local_experts[e].state_dict())


def step(layer, x, dy):
    """Run a step; return y, and the gradients of x and of the router's weights."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y, bias = layer(x)
    assert bias is None
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    y.backward(dy)
    return [t.detach().flatten(0, -2) for t in (y, x.grad, layer.router.weight.grad)]


def expert_gradients(layer):
    return [[p.grad for p in expert.parameters()] for expert in layer.experts.local_experts]


def tokens(groups, num=13):
    """Make this rank's tokens ``[S, 2, hidden]`` and a gradient, S another on each rank."""
    g = torch.Generator().manual_seed(dist.get_rank())
    shape = 2, num + 3 * dist.get_rank(groups.ep), 2, HIDDEN
    return torch.randn(shape, generator=g).bfloat16().to(DEVICE).unbind()


def check_equal(groups, alone):
    """With the bf16 wire, forward and gradients are those of one rank, but for BF16 roundings."""
    x, dy = tokens(groups)
    whole = make_layer(alone)
    want = step(whole, x, dy)
    want_experts = expert_gradients(whole)
    for gradient in sum(want_experts, []):
        dist.all_reduce(gradient, group=groups.ep)
    layers = {"fp4comm": make_layer(groups)}
    megatron.use(layers["fp4comm"], precision=EXACT)
    if DEVICE != "cpu":
        layers["alltoall"] = make_layer(groups, moe_token_dispatcher_type="alltoall")
    for layer in layers.values():
        copy_weights(whole, layer, groups)
        for got, of_whole in zip(step(layer, x, dy), want, strict=True):
            close_rows(got, of_whole)
        for got, e in zip(expert_gradients(layer), local_experts(groups), strict=True):
            for mine, of_whole in zip(got, want_experts[e], strict=True):
                close_rows(mine, of_whole)


def check_contract(groups, arrive, alignment):
    """The conformance test of all adapters, with a router and experts that it knows."""
    layer = make_layer(groups, MoESubmodules(experts=KnownExperts, router=GivenRouter))
    megatron.use(layer, arrive=arrive, expert_alignment=alignment)

    def moe(x, idx, weights, expert):
        chosen = (idx >= 0).nonzero(as_tuple=True)
        places = chosen[0], idx[chosen]
        shape = len(x), NUM_EXPERTS
        layer.router.probs = torch.zeros(shape, device=DEVICE).index_put(places, weights[chosen])
        layer.router.routing_map = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
        layer.router.routing_map[places] = True
        layer.experts.expert = expert
        return layer(x[:, None])[0][:, 0]

    t = SimpleNamespace(rank=dist.get_rank(groups.ep), num_ranks=dist.get_world_size(groups.ep))
    trains = arrive == "bf16"
    with torch.set_grad_enabled(trains):
        conformance.check(
            moe,
            t,
            num_experts=NUM_EXPERTS,
            hidden=HIDDEN,
            trains=trains,
            topk=TOPK,
            device=DEVICE,
            num_random=8,
        )


def check_own_experts(groups, alone):
    """SwiGLUExperts in a layer are `fp4comm.experts.swiglu`, to the bit."""
    layer = make_layer(groups, MoESubmodules(experts=megatron.SwiGLUExperts, router=Router))
    with raises(TypeError, "integrations.megatron.use was called for"):
        layer.experts(torch.zeros(1, HIDDEN), None, None)
    megatron.use(layer, expert_alignment=128)
    x, dy = tokens(groups)
    got = step(layer, x, dy)
    own = layer.experts.gate_up, layer.experts.down
    got += [p.grad.flatten(0, 1) for p in own]
    layer.zero_grad()
    x.requires_grad_()
    probs, routing_map = layer.router(x)
    idx = routing_map.nonzero()[:, 1].view(-1, TOPK)
    a2a = layer.token_dispatcher.a2a
    rows = x.flatten(0, 1)
    y = experts.swiglu(a2a, rows, idx, probs.gather(1, idx), *own)
    y.backward(dy.flatten(0, 1))
    want = [y, x.grad.flatten(0, 1), layer.router.weight.grad]
    want += [p.grad.flatten(0, 1) for p in own]
    for mine, expected in zip(got, want, strict=True):
        equal_rows(mine, expected)
    here = local_experts(groups)
    for name, tensor in layer.sharded_state_dict("layer.").items():
        if name.startswith("layer.experts."):
            assert tensor.global_shape[0] == NUM_EXPERTS
            assert tensor.global_offset == (here.start, 0, 0)


def check_recomputed(groups):
    """A layer that recomputes gives the same."""
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    x, dy = tokens(groups)
    steps = []
    for changed in ({}, recompute):
        layer = make_layer(groups, **changed)
        megatron.use(layer)
        steps.append(step(layer, x, dy))
    for got, want in zip(*steps, strict=True):
        equal_rows(got, want)


def check_padding_for_quantization(groups):
    """The alignment that the config wants becomes that of the segments."""
    layer = make_layer(groups, MoESubmodules(experts=KnownExperts, router=GivenRouter))
    layer.config.moe_router_padding_for_quantization = True
    megatron.use(layer)
    assert layer.token_dispatcher.a2a.expert_alignment == 16


def check_mistakes(groups, alone):
    """What is not supported is said at once, and what one rank does wrong on all."""
    with raises(ValueError, "model: expected one with a MoELayer, got Linear"):
        megatron.use(torch.nn.Linear(2, 2))
    layer = make_layer(groups, MoESubmodules(experts=KnownExperts, router=GivenRouter))
    for name, value in (
        ("params_dtype", torch.float32),
        ("moe_pad_expert_input_to_capacity", True),
        ("moe_shared_expert_overlap", True),
        ("overlap_moe_expert_parallel_comm", True),
    ):
        before = getattr(layer.config, name)
        setattr(layer.config, name, value)
        with raises(ValueError, f"{name}: expected {before} with fp4comm, got {value}"):
            megatron.use(layer)
        setattr(layer.config, name, before)
    layer.config.cuda_graph_impl = "local"
    with raises(ValueError, "cuda_graph_scope: expected none of an MoE layer"):
        megatron.use(layer)
    layer.config.cuda_graph_impl = "none"
    with raises(ValueError, "arrive: expected one of bf16, fp8, got 'packed'"):
        megatron.use(layer, arrive="packed")
    layer.token_dispatcher.tp_size = 2
    with raises(ValueError, "expert_tensor_parallel_size: expected 1, got 2"):
        megatron.use(layer)
    layer.token_dispatcher.tp_size = 1
    with raises(ValueError, "gated_linear_unit: expected True with fp4comm, got False"):
        megatron.SwiGLUExperts(1, config_of(1, gated_linear_unit=False), alone)
    megatron.use(layer)
    rank = dist.get_rank(groups.ep)
    num_chosen = TOPK + (rank == 1)
    layer.router.probs = torch.ones(1, NUM_EXPERTS, device=DEVICE)
    layer.router.routing_map = torch.arange(NUM_EXPERTS, device=DEVICE)[None] < num_chosen
    token = torch.ones(1, 1, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    with raises(ValueError, "rank 1 of", f"at most moe_router_topk = {TOPK} experts a token"):
        layer(token)
    if rank == 1:  # whose mark of a token with too many would be an expert
        layer.router.probs = layer.router.probs[:, 1:]
        layer.router.routing_map = layer.router.routing_map[:, 1:]
    wanted = f"routing_map: expected {NUM_EXPERTS} columns, one an expert, got {NUM_EXPERTS - 1}"
    with raises(ValueError, "rank 1 of", wanted):
        layer(token)


def check_older_release():
    """A release without a hook is refused at import."""
    method = MoETokenDispatcher.dispatch_preprocess
    del MoETokenDispatcher.dispatch_preprocess
    with raises(ImportError, "0.16.1, got one without dispatch_preprocess"):
        importlib.reload(megatron)
    MoETokenDispatcher.dispatch_preprocess = method


def main(ep_sizes):
    start_ranks(DEVICE)
    alone = groups_alone()
    for ep_size in map(int, ep_sizes):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ep_size)
        groups = get_default_pg_collection()
        check_equal(groups, alone)
        check_contract(groups, "bf16", None)
        check_contract(groups, "fp8", 16)
        check_own_experts(groups, alone)
        check_padding_for_quantization(groups)
        check_mistakes(groups, alone)
        if DEVICE != "cpu":
            check_recomputed(groups)
        parallel_state.destroy_model_parallel()
        print(f"rank {dist.get_rank()}: {ep_size} right", flush=True)
    check_older_release()


if __name__ == "__main__":
    main(sys.argv[2:])
