"""A real vLLM FusedMoEKernel on CPU ranks, through the plugin: conformance, plain cases, mistakes.

vLLM initializes its own groups (data and expert parallel) over gloo.  The experts are a subclass of
its FusedMoEExpertsModular in plain torch; all else is vLLM's.
"""

import contextlib
import dataclasses
import os
import re
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import conformance
import pytest
import torch
import vllm.platforms
from signatures import check_implements
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()  # as vLLM's CPU builds have it

import vllm.model_executor.layers.fused_moe.modular_kernel as mk  # noqa: E402
from vllm.config import (  # noqa: E402
    CompilationConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.layers.fused_moe import all2all_utils  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import (  # noqa: E402
    determine_expert_map,
)
from vllm.model_executor.layers.fused_moe.oracle import fp8  # noqa: E402
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (  # noqa: E402
    TopKWeightAndReduceNoOP,
)
from vllm.plugins import DEFAULT_PLUGINS_GROUP  # noqa: E402

from fp4comm import quantize  # noqa: E402
from fp4comm.integrations import plugins  # noqa: E402
from fp4comm.integrations.vllm import (  # noqa: E402
    PrepareAndFinalize,
    install,
    make_prepare_finalize,
)

EXPERTS, HIDDEN = 7, 256
RANK, NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PORT = int(os.environ["MASTER_PORT"])


class WeightAndReduce(mk.TopKWeightAndReduce):
    """Sums ``[M', k, hidden]``, as vLLM's own does with a CUDA operator."""

    def apply(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
    ):
        assert output is None
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        return (fused_expert_output.float() * weights[:, :, None]).sum(1).bfloat16()


class Experts(mk.FusedMoEExpertsModular):
    """Applies a function to the rows of each local expert, dequantized where they are FP8."""

    reduces = True
    expert = None  # expert(rows, expert_id) -> rows
    packed_scales = False
    quantizes = False

    @staticmethod
    def activation_format():
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device():
        return True

    _supports_no_act_and_mul = _supports_current_device

    @staticmethod
    def _supports_activation(activation):
        return True

    _supports_parallel_config = _supports_activation

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key):
        return True

    @property
    def expects_unquantized_inputs(self):
        return self.quantizes

    def supports_packed_ue8m0_act_scales(self):
        return self.packed_scales

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP() if self.reduces else WeightAndReduce()

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, meta, activation
    ):
        return (0,), (0,), (M, K) if self.reduces else (M, topk, K)

    def apply(
        self,
        output,
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        global_num_experts,
        expert_map,
        a1q_scale,
        a2_scale,
        workspace13,
        workspace2,
        expert_tokens_meta,
        apply_router_weight_on_input,
    ):
        assert (topk_ids >= 0).all()  # kernels take no -1
        assert (topk_ids < global_num_experts).all()
        rows = hidden_states
        if a1q_scale is not None:
            assert rows.dtype == torch.float8_e4m3fn
            assert a1q_scale.dtype == torch.float32
            assert a1q_scale.shape == (len(rows), HIDDEN // 128)
            rows = (rows.float() * a1q_scale.repeat_interleave(128, 1)).bfloat16()  # exact
        assert rows.dtype == torch.bfloat16
        local = expert_map[topk_ids]
        counts = torch.bincount(local[local >= 0], minlength=len(w1)).int()
        assert torch.equal(expert_tokens_meta.expert_num_tokens, counts)
        assert torch.equal(expert_tokens_meta.expert_num_tokens_cpu, counts)
        out = torch.zeros(*topk_ids.shape, rows.shape[1])
        for e in topk_ids[local >= 0].unique().tolist():
            at, slot = (topk_ids == e).nonzero(as_tuple=True)
            out[at, slot] = self.expert(rows[at], e).float()
        if self.reduces:
            weights = (
                torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
            )
            out = (out * weights[:, :, None]).sum(1)
        output.copy_(out.bfloat16())


def moe_config(parallel, **changed):
    local = determine_expert_map(parallel.ep_size, parallel.ep_rank, EXPERTS)[0]
    sizes = {
        "num_experts": EXPERTS,
        "experts_per_token": 2,
        "hidden_dim": HIDDEN,
        "intermediate_size": 64,
        "num_local_experts": local,
        "num_logical_experts": EXPERTS,
        "activation": MoEActivation.SILU,
        "device": "cpu",
        "routing_method": RoutingMethodType.Default,
        "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16,
    }
    return FusedMoEConfig(**sizes | changed)


def block_fp8(block_shape=(128, 128), **changed):
    """Quantization of DeepSeek-V3's kind; the weight scales are not read."""
    scale = torch.ones(1)
    shape = {"block_shape": list(block_shape)}
    return fp8_w8a8_moe_quant_config(w1_scale=scale, w2_scale=scale, **shape | changed)


def make_kernel(moe, quant, cls=Experts):
    """Make the kernel as vLLM does for block-FP8 layers; the factory in there is ours by now."""
    return fp8.make_fp8_moe_kernel(quant, moe, cls, fp8.Fp8MoeBackend.TRITON)


def layer_of(kernel, parallel, on_input=False):
    local, expert_map, _ = determine_expert_map(parallel.ep_size, parallel.ep_rank, EXPERTS)
    w1, w2 = torch.empty(local, 2, HIDDEN), torch.empty(local, HIDDEN, 1)

    def moe(x, idx, weights, expert):
        kernel.fused_experts.expert = expert
        sizes = {"global_num_experts": EXPERTS, "expert_map": expert_map}
        sizes |= {"activation": MoEActivation.SILU, "apply_router_weight_on_input": on_input}
        with torch.inference_mode():
            return kernel.apply(x, w1, w2, weights, idx, **sizes)

    return moe


def fp8_values(x, wire="mxfp4"):
    codes, scales = quantize(x, wire).to_fp8_rows()
    return codes.float() * scales.repeat_interleave(128, 1)


def check_conformance(moe_cfg, parallel):
    t = mock.Mock(rank=RANK, num_ranks=NUM_RANKS)
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "trains": False}
    kernel = make_kernel(moe_cfg, block_fp8())
    conformance.check(layer_of(kernel, parallel), t, arrived=fp8_values, **sizes)

    class Unreduced(Experts):
        reduces = False

    kernel = make_kernel(moe_cfg, block_fp8(), Unreduced)
    conformance.check(layer_of(kernel, parallel), t, arrived=fp8_values, num_random=4, **sizes)

    class Quantizes(Experts):  # for themselves: BF16 rows
        quantizes = True

    for cls, quant in (Experts, FUSED_MOE_UNQUANTIZED_CONFIG), (Quantizes, block_fp8((64, 64))):
        kernel = make_kernel(moe_cfg, quant, cls)
        conformance.check(layer_of(kernel, parallel), t, num_random=4, **sizes)


def check_weights_on_input(moe_cfg, parallel):
    """Weights applied before the wire: what arrives are the quantized products."""
    moe = layer_of(make_kernel(moe_cfg, block_fp8()), parallel, on_input=True)
    g = torch.Generator().manual_seed(RANK)
    x = torch.randn(9, HIDDEN, generator=g).bfloat16()
    idx = torch.randint(0, EXPERTS, (9, 1), generator=g)
    weights = torch.rand(9, 1, generator=g)
    y = moe(x, idx, weights, lambda rows, e: rows * (e + 1))
    want = fp8_values(x * weights.bfloat16()).bfloat16() * (idx + 1)
    assert torch.equal(y, want.bfloat16())
    raises("expected with one expert a token, got 2", moe, x, idx.repeat(1, 2), weights, None)


def raises(text, call, *args, **kwargs):
    with pytest.raises((ValueError, RuntimeError), match=re.escape(text)):
        call(*args, **kwargs)


def check_mistakes(moe_cfg, parallel, config):
    """Each on the last rank alone, all but two at construction: the same error on all."""
    is_last, where = RANK == NUM_RANKS - 1, f"rank {NUM_RANKS - 1} of {NUM_RANKS}: "
    kernel = make_kernel(moe_cfg, block_fp8())
    prepared = kernel.prepare_finalize
    assert type(prepared) is PrepareAndFinalize

    class Packed(Experts):
        packed_scales = True

    class Monolithic(mk.FusedMoEExpertsMonolithic):
        pass

    def changed(text, quant=None, cls=Experts, parallel_changes=None, **changes):
        given = moe_cfg, block_fp8()
        if is_last:
            changes["moe_parallel_config"] = dataclasses.replace(parallel, **parallel_changes or {})
            given = moe_config(parallel, **changes), quant or block_fp8(), cls
        with pytest.raises(ValueError, match=f"^{where}.*{re.escape(text)}"):
            make_kernel(*given)

    def on_last(*args):
        return mock.patch.object(*args) if is_last else contextlib.nullcontext()

    changed("block_shape [128, 128], got quant_dtype", quant=block_fp8((64, 64)))
    changed("static scale True", quant=block_fp8(a1_scale=torch.ones(1)))
    changed("which takes packed UE8M0 scales", cls=Packed)
    changed("expected modular experts", cls=Monolithic)
    narrow = moe_config(parallel, hidden_dim=160)  # which has to be the same on all ranks
    raises("rank 0 of 2: hidden_dim: expected a multiple of 128", make_kernel, narrow, block_fp8())
    changed("in_dtype bfloat16, got torch.float16", in_dtype=torch.float16)
    changed("got tp_size 2", parallel_changes={"tp_size": 2})
    changed("expected ep_size 2", parallel_changes={"ep_size": 4})
    changed("all2all_backend: expected", parallel_changes={"all2all_backend": "deepep_v2"})
    changed("--data-parallel-size > 1", parallel_changes={"use_ep": False})
    wire = "fp5" if is_last else "mxfp4"
    raises(f"{where}FP4COMM_WIRE: expected one of", make_prepare_finalize, moe_cfg, wire)
    with on_last(config.compilation_config, "cudagraph_mode", CUDAGraphMode.PIECEWISE):
        changed("cudagraph_mode: expected NONE (--enforce-eager), got PIECEWISE")
    with on_last(config.parallel_config, "enable_dbo", True):
        changed("expected no micro-batches")
    with on_last(config.parallel_config, "expert_placement_strategy", "round_robin"):
        changed("expert_placement_strategy: expected linear, got round_robin")
    placed = determine_expert_map(parallel.ep_size, parallel.ep_rank, EXPERTS, "round_robin")[1]
    x, idx = torch.zeros(2, HIDDEN).bfloat16(), torch.zeros(2, 1, dtype=torch.int64)
    args = x, idx.float(), idx, EXPERTS, placed if is_last else None, False, block_fp8(), False
    raises(f"{where}expert_map: expected experts", prepared.prepare, *args)
    raises("finalize: expected after prepare", prepared.finalize, x, x, idx, idx, False, None)


def other_factory(moe):
    """A factory of another release."""


def check_interface():
    """What we implement is what this release of vLLM calls."""
    shared = check_implements(PrepareAndFinalize, mk.FusedMoEPrepareAndFinalizeModular)
    assert {"prepare", "prepare_async", "finalize", "finalize_async"} <= set(shared)
    assert len(mk.PrepareResultType.__args__) == 5
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'[project.entry-points."{DEFAULT_PLUGINS_GROUP}"]' in text
    with mock.patch.object(all2all_utils, "maybe_make_prepare_finalize", other_factory):
        raises("expected maybe_make_prepare_finalize(moe, ..., use_monolithic)", install, "mxfp4")


def main():
    check_interface()
    ports = {"_data_parallel_master_port_list": [PORT], "data_parallel_master_ip": "127.0.0.1"}
    ranks = {"data_parallel_size": NUM_RANKS, "data_parallel_rank": RANK}
    config = VllmConfig(
        parallel_config=ParallelConfig(
            enable_expert_parallel=True, is_moe_model=True, **ranks, **ports
        ),
        compilation_config=CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE),
    )
    with set_current_vllm_config(config):
        where = f"tcp://127.0.0.1:{PORT}"
        init_distributed_environment(1, 0, where, 0, backend="gloo")
        initialize_model_parallel(1, backend="gloo")
        parallel = FusedMoEParallelConfig.make(1, 1, NUM_RANKS, 1, config.parallel_config)
        moe_cfg = moe_config(parallel)

        before = fp8.maybe_make_prepare_finalize
        plugins.vllm()
        assert fp8.maybe_make_prepare_finalize is before  # FP4COMM_WIRE is not set
        os.environ["FP4COMM_WIRE"] = "mxfp4"
        plugins.vllm()
        check_conformance(moe_cfg, parallel)
        check_weights_on_input(moe_cfg, parallel)
        check_mistakes(moe_cfg, parallel, config)
    print("passed")


main()
