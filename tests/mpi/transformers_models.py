"""Small random models of Transformers with their experts on several ranks, beside whole ones.

A whole model runs on this rank's tokens with an experts function that quantizes the rows and rounds
the sums as the wires do, and is Transformers' own for the rest: logits differ by what products of
other numbers of rows may.  Beside it the model as it is, which the bf16 wire is to equal to BF16
rounding: the one that lies between that model and itself in float32.  Roundings may turn a near
tie of the router: tokens from there on are not compared.
"""

import copy
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["HF_HUB_OFFLINE"] = "1"

import conformance
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transport_cases import raises

from fp4comm import Precision, quantize
from fp4comm.integrations import transformers as adapter
from fp4comm.integrations._common import transport_of
from fp4comm.routing import Placement

LIMIT = 2.0**-6  # of a row of logits, by norm: few of its values are rounded another way
NUM_EXPERTS = 9  # two ranks: 5 and 4

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
MODELS = {
    "Mixtral": {"num_local_experts": NUM_EXPERTS, "intermediate_size": 48},
    "Qwen3Moe": {"num_experts": NUM_EXPERTS, "moe_intermediate_size": 48, "head_dim": 16},
    "DeepseekV3": {
        "n_routed_experts": NUM_EXPERTS, "n_group": 3, "topk_group": 2, "moe_intermediate_size": 48,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 1,
        "num_hidden_layers": 3, "intermediate_size": 96,
    },
    "GptOss": {"num_local_experts": NUM_EXPERTS, "intermediate_size": 48, "head_dim": 16},
}  # fmt: skip


def make(kind, **changed):
    """Make a whole model of one kind, the same on all ranks."""
    torch.manual_seed(len(kind))
    config = getattr(transformers, f"{kind}Config")(**SIZES | MODELS[kind] | changed)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=2 * parameter.shape[-1] ** -0.5)
    return model.bfloat16()


def as_by_wires(wire, num_ranks):
    """Make an experts function of whole experts: rows quantized, sums of a rank rounded to BF16."""
    owners = torch.from_numpy(Placement(NUM_EXPERTS, num_ranks).owners.astype(int))

    def forward(module, hidden_states, top_k_index, top_k_weights):
        rows = Straight.apply(hidden_states, wire)
        num_topk = top_k_index.shape[1]
        slots = rows.repeat_interleave(num_topk, 0), top_k_index.reshape(-1, 1)
        ones = torch.ones(len(slots[0]), 1, dtype=rows.dtype)
        out = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, *slots, ones)
        weighted = out.view(*top_k_index.shape, -1).float() * top_k_weights.float()[:, :, None]
        y = torch.zeros(rows.shape)
        for rank in range(num_ranks):
            here = (owners[top_k_index] == rank)[:, :, None] * weighted
            y = y + sum(here.unbind(1)).bfloat16().float()
        return y.bfloat16()

    return forward


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, wire):
        return quantize(rows, wire).to_bf16()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def shard(model, t, wire):
    """Make the two models: one sharded, one whole that does as the wires do."""
    name = f"as by {wire}"
    ALL_EXPERTS_FUNCTIONS.register(name, as_by_wires(wire, t.num_ranks))
    sharded, whole = copy.deepcopy(model), copy.deepcopy(model)
    precision = Precision(wire, combine_grad="bf16")
    assert adapter.shard_experts(sharded, None, precision, timeout_s=60) is sharded
    whole.config._experts_implementation = name
    assert sharded.config._experts_implementation == model.config._experts_implementation
    return sharded.eval(), whole.eval()


def routes(model, into):
    """Note which experts each call of a layer's experts chose."""

    def note(module, args, kwargs):
        into.append(args[1].sort(-1).values)

    modules = [m for m in model.modules() if hasattr(m, "is_transposed")]
    return [m.register_forward_pre_hook(note, with_kwargs=True) for m in modules]


def run(model, ids):
    """Return logits and routes."""
    routed = []
    hooks = routes(model, routed)
    with torch.no_grad():
        logits = model(ids).logits.float()
    for hook in hooks:
        hook.remove()
    return logits, routed


def errors(a, b):
    """Relative error of each row of logits that is behind no other route; the share of them."""
    (got, routed), (want, other) = a, b
    same = torch.ones(got.shape[:2], dtype=torch.bool)
    for mine, theirs in zip(routed, other, strict=True):
        same &= (mine == theirs).all(-1).view(same.shape)
    same = same.long().cumprod(1).bool()
    return relative(got, want)[same], same.float().mean()


def relative(got, want):
    return (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)


def tokens_of(rank, num_rows, num_tokens):
    g = torch.Generator().manual_seed(10 + rank)
    return torch.randint(1, 128, (num_rows, num_tokens), generator=g)


def check_logits(sharded, whole, plain, wire, t):
    """Each rank has another number of tokens."""
    ids = tokens_of(t.rank, 6 - t.rank, 5)
    got, as_it_is = run(sharded, ids), run(plain, ids)
    error, share = errors(got, run(whole, ids))
    assert share > 0.9, share
    assert (error <= LIMIT).all(), error
    error, share = errors(got, as_it_is)
    if wire == "bf16":
        of_rounding, _ = errors(as_it_is, run(copy.deepcopy(plain).float(), ids))
        assert share > 0.5, share
        assert error.mean() <= of_rounding.mean(), (error, of_rounding)
    else:  # LIMIT tells quantized rows from others
        assert relative(got[0], as_it_is[0]).mean() > 4 * LIMIT


def check_generate(sharded, whole, t):
    """Ranks generate different numbers of tokens, with a cache; then both see the whole text."""
    ids = tokens_of(t.rank, 2 + t.rank, 3)
    new = 3 + 4 * t.rank
    out = sharded.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        synced_gpus=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert out.sequences.shape == (2 + t.rank, 3 + new)
    got = torch.stack(out.logits, 1)
    assert torch.equal(got.argmax(-1), out.sequences[:, 3:])
    with torch.no_grad():
        want = whole(out.sequences).logits[:, 2:-1]
    # A cache changes roundings, which may turn a route.
    right = relative(got, want) <= 4 * LIMIT
    assert right.float().mean() > 0.5, relative(got, want)


def check_training(kind, wire, t):
    """All experts of every token, so that no route can turn; losses of all ranks together."""
    few = {"DeepseekV3": {"n_group": 1, "topk_group": 1}}.get(kind, {})
    sharded, whole = shard(make(kind, num_experts_per_tok=NUM_EXPERTS, **few), t, wire)
    batches = [tokens_of(5 + rank, 3, 4 + rank) for rank in range(t.num_ranks)]
    loss = sharded(batches[t.rank], labels=batches[t.rank]).loss
    loss.backward()
    sum(whole(ids, labels=ids).loss for ids in batches).backward()
    of_experts = adapter.expert_parameters(sharded)
    assert of_experts
    for name, parameter in whole.named_parameters():
        mine = sharded.get_parameter(name)
        want, got = parameter.grad, mine.grad
        if name in of_experts:
            first = 5 * t.rank
            want = want[first : first + len(mine)]
            assert len(mine) == (5, 4)[t.rank]
        else:
            dist.all_reduce(got)
        error = relative(got.flatten(), want.flatten())
        # Sums over tokens, in BF16, each in the order of its batches.
        assert error <= 2 * LIMIT, f"{name}: {error}"
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter -= 0.05 * parameter.grad
    total, after = loss.detach(), sharded(batches[t.rank], labels=batches[t.rank]).loss.detach()
    dist.all_reduce(total)
    dist.all_reduce(after)
    assert after < total


def conforming(t):
    """Make a moe of Nemotron-H's experts: up the identity, down what the expert does."""
    config = transformers.NemotronHConfig(
        n_routed_experts=6, hidden_size=64, moe_intermediate_size=64, mlp_hidden_act="linear"
    )

    def layer_of(x, idx, weights, expert):
        layer = torch.nn.ModuleDict({"experts": NemotronHExperts(config).bfloat16()})
        factors = torch.cat([expert(torch.ones(1, 64), e) for e in range(6)])
        with torch.no_grad():
            layer["experts"].up_proj.copy_(torch.eye(64))
            layer["experts"].down_proj.copy_(factors.diag_embed())
        adapter.shard_experts(layer)
        return layer["experts"](x, torch.where(idx < 0, 6, idx), weights)

    return layer_of


def check_autocast(t):
    """A model in float32, under autocast: gradients come in float32 too."""
    model = make("Mixtral").float()
    adapter.shard_experts(model)
    ids = tokens_of(t.rank, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids).loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def check_mistakes(t):
    """All ranks make each of them, as the model is the same on all; but for the time limit."""
    mistakes = {
        "model: expected experts with Transformers' experts hook, got Linear without": (
            ValueError, lambda: adapter.shard_experts(torch.nn.Linear(2, 2))),
        "hidden: expected a multiple of 32, got 80": (
            ValueError, lambda: adapter.shard_experts(make("Mixtral", hidden_size=80))),
        "got model.layers.0.mlp.experts sharded already": (
            ValueError, lambda: adapter.shard_experts(adapter.shard_experts(make("Mixtral")))),
        "got model.layers.0.mlp.experts.gate_up_proj on a device mesh": (
            ValueError, lambda: adapter.shard_experts(on_mesh(make("Mixtral"), t))),
        "got model.layers.0.mlp.experts.gate_up_proj in torch.float8_e4m3fn": (
            TypeError, lambda: adapter.shard_experts(make("Mixtral").to(torch.float8_e4m3fn))),
        "expected 9 experts in the first dimension of model.layers.0.mlp.experts.scale": (
            ValueError, lambda: adapter.shard_experts(with_scale(make("Mixtral")))),
        "experts: expected shard_experts(model, group)": (
            RuntimeError, lambda: of_implementation("fp4comm")(tokens_of(0, 1, 2))),
        "rank 1 of 2: timeout_s: expected more than 0 seconds, got 0": (
            ValueError, lambda: adapter.shard_experts(
                make("Mixtral"), dist.new_group(), timeout_s=60 * (1 - t.rank))),
        "x: expected bfloat16 or an FP8 pair": (
            TypeError, lambda: adapter.shard_experts(make("Mixtral").float())(tokens_of(0, 1, 2))),
    }  # fmt: skip
    for text, (kind, mistake) in mistakes.items():
        with raises(kind, text):
            mistake()
    with raises(ImportError, "cannot import name 'ALL_EXPERTS_FUNCTIONS'", "; supported are"):
        del moe.ALL_EXPERTS_FUNCTIONS
        importlib.reload(adapter)
    moe.ALL_EXPERTS_FUNCTIONS = ALL_EXPERTS_FUNCTIONS


def on_mesh(model, t):
    mesh = init_device_mesh("cpu", (t.num_ranks,))
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj = torch.nn.Parameter(distribute_tensor(experts.gate_up_proj, mesh))
    return model


def with_scale(model):
    model.model.layers[0].mlp.experts.scale = torch.nn.Parameter(torch.ones(1))
    return model


def of_implementation(name):
    config = transformers.MixtralConfig(**SIZES | MODELS["Mixtral"], experts_implementation=name)
    return transformers.MixtralForCausalLM(config).bfloat16()


dist.init_process_group("gloo")
t = transport_of()
conformance.check(conforming(t), t, num_experts=6, hidden=64, trains=True)
has_grouped_mm, adapter._has_grouped_mm = adapter._has_grouped_mm, lambda *_: False
conformance.check(conforming(t), t, num_experts=6, hidden=64, trains=True, num_random=4)
adapter._has_grouped_mm = has_grouped_mm
check_autocast(t)
check_mistakes(t)
for kind in MODELS:
    model = make(kind).eval()
    for wire in ("bf16", "mxfp4"):
        sharded, whole = shard(model, t, wire)
        check_logits(sharded, whole, model, wire, t)
        check_generate(sharded, whole, t)
        check_training(kind, wire, t)
        print(f"rank {t.rank}: {kind} {wire} right", flush=True)
