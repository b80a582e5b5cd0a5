"""SGLang's own factory, hooks, settings and types with the dispatcher of the plugin.

Ranks are threads of this process, since importing SGLang takes long.  In place of its runner, which
needs a GPU, plain torch computes on what the format DEEPEP_NORMAL promises.
"""

import inspect
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import os

import conformance
import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.moe import MoeRunnerConfig, utils
from sglang.srt.layers.moe.fused_moe_triton import layer
from sglang.srt.layers.moe.token_dispatcher import base
from sglang.srt.layers.moe.token_dispatcher.base import DispatchOutput
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPNormalCombineInput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from signatures import check_implements

from fp4comm import quantize, transport
from fp4comm.integrations import plugins
from fp4comm.integrations.sglang import Dispatcher, make_dispatcher
from fp4comm.routing import Placement

EXPERTS, HIDDEN, NUM_RANKS = 7, 256, 3
MODEL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "num_local_experts": EXPERTS,
    "vocab_size": 64,
    "intermediate_size": 64,
    "torch_dtype": "bfloat16",
}


def make(t, **changed):
    local = Placement(EXPERTS, t.num_ranks).num_local_experts(t.rank)
    sizes = {"num_experts": EXPERTS, "num_local_experts": local, "hidden_size": HIDDEN}
    return Dispatcher(t, **sizes | changed)


def layer_of(dispatcher, t, quantized=True):
    offsets = Placement(EXPERTS, t.num_ranks).offsets
    first, num_local = int(offsets[t.rank]), int(offsets[t.rank + 1] - offsets[t.rank])

    def moe(x, idx, weights, expert):
        routed = StandardTopKOutput(topk_weights=weights, topk_ids=idx.int(), router_logits=None)
        with torch.inference_mode():
            out = dispatcher.dispatch(hidden_states=x, topk_output=routed)
            assert isinstance(out, DispatchOutput)
            assert out.format.is_deepep_normal()
            rows, scales, ids, row_weights, num_rows = out
            counts = torch.bincount(ids[ids >= 0], minlength=num_local).tolist()
            assert num_rows == counts
            if quantized:
                assert rows.dtype == torch.float8_e4m3fn
                assert scales.shape == (len(rows), HIDDEN // 128)
                rows = (rows.float() * scales.repeat_interleave(128, 1)).bfloat16()  # exact
            assert rows.dtype == torch.bfloat16
            sums = torch.zeros(rows.shape)
            for k in range(ids.shape[1]):
                for e in ids[:, k][ids[:, k] >= 0].unique().tolist():
                    at = (ids[:, k] == e).nonzero().flatten()
                    sums[at] += expert(rows[at], first + e).float() * row_weights[at, k][:, None]
            combine_input = DeepEPNormalCombineInput(sums.bfloat16(), ids, row_weights)
            return dispatcher.combine(combine_input=combine_input)

    return moe


def fp8_values(x):
    codes, scales = quantize(x, "mxfp4").to_fp8_rows()
    return codes.float() * scales.repeat_interleave(128, 1)


def on_rank(t):
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "trains": False}
    conformance.check(layer_of(make(t), t), t, arrived=fp8_values, **sizes)

    dispatcher = make(t)  # with the experts' word for BF16 rows, and a hook of each kind
    dispatcher.set_quant_config({"dispatcher_output_dtype": "bf16"})
    seen = []
    dispatcher.register_pre_dispatch_hook(lambda *_: seen.append("pre dispatch"))
    dispatcher.register_post_dispatch_hook(lambda *_: seen.append("post dispatch"))
    dispatcher.register_pre_combine_hook(lambda *_: seen.append("pre combine"))
    dispatcher.register_post_combine_hook(lambda *_: seen.append("post combine"))
    moe = layer_of(dispatcher, t, quantized=False)
    conformance.check(moe, t, num_random=4, **sizes)
    assert seen[:4] == ["pre dispatch", "post dispatch", "pre combine", "post combine"]
    check_mistakes_of_one(t)


def check_mistakes_of_one(t):
    """What is wrong on the last rank alone is the same error on all, and the next call is right."""
    is_last, where = t.rank == t.num_ranks - 1, "^rank 2 of 3: "
    for wrong, text in (
        ({"params_dtype": torch.half}, "params_dtype: expected bfloat16, got torch.float16"),
        ({"num_local_experts": 7}, "num_local_experts: expected 2 of 7 experts, got 7"),
    ):
        raises(where + text, make, t, **wrong if is_last else {})
    dispatcher = make(t)
    x, idx = torch.zeros(3, HIDDEN).bfloat16(), torch.zeros(3, 1, dtype=torch.int64)
    routed = StandardTopKOutput(torch.ones(idx.shape), idx, None)
    dispatcher.set_quant_config({"dispatcher_output_dtype": "nvfp4"} if is_last else {})
    text = "quant_config: expected rows wanted as fp8 or bf16, got nvfp4"
    raises(where + text, dispatcher.dispatch, x, routed)
    dispatcher.set_quant_config({})
    assert len(dispatcher.dispatch(x, routed).hidden_states) == (9 if t.rank == 0 else 0)


def check_counts_for_deep_gemm(t):
    """Its kernel takes segments of whole 128 rows; the rows are those of each token and rank."""
    with mock.patch.object(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True):
        dispatcher = make(t)
    idx = torch.tensor([[0, 1]] * 130 + [[1, 3]])
    routed = StandardTopKOutput(torch.ones(idx.shape), idx, None)
    out = dispatcher.dispatch(torch.zeros(131, HIDDEN).bfloat16(), routed)
    assert out.num_recv_tokens_per_expert == [256, 256, 0, 128, 0, 0, 0]
    assert out.hidden_states.shape == (131, HIDDEN)
    x = torch.zeros(131, HIDDEN).bfloat16()
    y = dispatcher.combine(DeepEPNormalCombineInput(x, out.topk_ids, out.topk_weights))
    assert y.shape == x.shape


def check_factory():
    """SGLang's factory, hooked by its own registry, makes our dispatcher where FP4COMM_WIRE is set.

    Over SGLang's own group of one rank.
    """
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'[project.entry-points."{GENERAL_PLUGINS_GROUP}"]' in text
    original = layer.create_moe_dispatcher
    assert list(inspect.signature(original).parameters)[0] == "moe_runner_config"
    plugins.sglang()
    HookRegistry.apply_hooks()
    assert layer.create_moe_dispatcher is original
    os.environ["FP4COMM_WIRE"] = "mxfp4"
    plugins.sglang()
    HookRegistry.apply_hooks()
    config = MoeRunnerConfig(
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        hidden_size=HIDDEN,
        top_k=2,
        params_dtype=torch.bfloat16,
    )
    with tempfile.NamedTemporaryFile() as file:
        where = {"backend": "gloo", "distributed_init_method": f"file://{file.name}"}
        init_distributed_environment(1, 0, **where)
        initialize_model_parallel()
        made = layer.create_moe_dispatcher(config, quant_method=None)
    assert type(made) is Dispatcher
    one = transport.open("local")
    raises(
        "^rank 0 of 1: FP4COMM_WIRE: expected one of .*'fp5'", make_dispatcher, config, "fp5", one
    )
    for enum, flag, text in (
        (utils.MoeA2ABackend.NIXL, "a2a_backend", "moe_a2a_backend: expected deepep .* got nixl"),
        (utils.DeepEPMode.AUTO, "deepep_mode", "deepep_mode: expected normal, got auto"),
    ):
        with mock.patch.object(runtime_context.get_flags().moe, flag, enum):
            raises(text, make_dispatcher, config, "mxfp4", one)


def raises(text, call, *args, **kwargs):
    with pytest.raises((ValueError, RuntimeError), match=text):
        call(*args, **kwargs)


def check_mistakes(t):
    raises("num_local_experts: expected 7 of 7 experts", make, t, num_local_experts=3)
    raises("hidden_size: expected a multiple of 128", make, t, hidden_size=160)
    raises("params_dtype: expected bfloat16, got torch.float16", make, t, params_dtype=torch.half)
    d = make(t)
    raises("expected no single-batch overlap", d.set_overlap_args, None, {})
    rows = torch.zeros(0, HIDDEN).bfloat16()
    early = DeepEPNormalCombineInput(rows, rows, rows)
    raises("combine: expected after dispatch", d.combine, early)
    raises("expected format DEEPEP_NORMAL, got STANDARD", d.combine, standard_input(rows))
    with mock.patch.object(deep_gemm_wrapper, "DEEPGEMM_SCALE_UE8M0", True):
        raises("DEEPGEMM_SCALE_UE8M0: expected experts that take float32 scales", make, t)
    for name, text in (("tbo_enabled", "two_batch"), ("sbo_enabled", "single_batch")):
        with mock.patch.object(runtime_context.get_flags().moe, name, True):
            raises(f"enable_{text}_overlap: expected off", make, t)


def standard_input(rows):
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    return StandardCombineInput(hidden_states=rows)


def main():
    shared = check_implements(Dispatcher, base.BaseDispatcher)
    assert {"dispatch", "combine", "set_overlap_args"} <= set(shared)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        a2a = {"moe_a2a_backend": "deepep", "deepep_mode": "normal"}
        args = ServerArgs(folder, device="cpu", load_format="dummy", **a2a)
        set_global_server_args_for_scheduler(args)
    utils.initialize_moe_config()
    transport.run_local(NUM_RANKS, on_rank, timeout_s=120)
    one = transport.open("local")
    check_counts_for_deep_gemm(one)
    check_mistakes(one)
    check_factory()
    sys.stdout.write("passed\n")


main()
