"""vLLM: tokens go to their experts in 4 bits, and vLLM's own kernels compute on the FP8 rows.

Run with vLLM 0.33.0, on CPU ranks: its groups, configs, factory, base classes and `FusedMoEKernel`,
with experts in plain torch.  Not run, since they need a GPU: its own experts, its sum of ``[M', k,
hidden]`` outputs (`TopKWeightAndReduceContiguous`), and a server.

In a server, with fp4comm installed beside vLLM::

    FP4COMM_WIRE=mxfp4 vllm serve MODEL --enable-expert-parallel --data-parallel-size 8 \\
        --enforce-eager

vLLM takes all2all backends from a closed list.  So the plugin, an entry point of group
``vllm.general_plugins``, puts a factory of ours before vLLM's `maybe_make_prepare_finalize`; where
FP4COMM_WIRE is not set it does nothing.  The backend stays "allgather_reducescatter", the default,
which keeps no buffers; nothing travels by it.

The layout is that of vLLM's DeepEP high-throughput path: one row for each token and rank,
``[M', hidden]``, with the ids of its top-k experts ``[M', k]``, those on other ranks replaced by
one that is not local.  Experts weight and sum their outputs by row, and the sums travel back.

Eager only: the host reads the counts, so that a CUDA graph cannot hold it.  No micro-batches
(DBO), LoRA, tensor parallelism inside experts, or round-robin placement.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fp4comm import AllToAll, Precision, WireFormat, agreement, autograd
from fp4comm.dispatched import Dispatched, Handle
from fp4comm.formats import FP8_BLOCK
from fp4comm.integrations._common import WIRE, transport_of
from fp4comm.routing import NO_EXPERT, Placement
from fp4comm.transport import Transport

try:
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.modular_kernel import (
        FusedMoEPrepareAndFinalizeModular,
    )
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceContiguous,
        TopKWeightAndReduceDelegate,
    )
except ImportError as error:
    raise ImportError(
        "fp4comm.integrations.vllm: expected vLLM with FusedMoEPrepareAndFinalizeModular (0.33.0"
        f" has it); importing it failed with {type(error).__name__}: {error}"
    ) from error

BACKEND = "allgather_reducescatter"  # vLLM's default
BLOCK_SHAPE = [FP8_BLOCK, FP8_BLOCK]


class PrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Quantized dispatch and combine for vLLM's modular MoE kernels.

    Block-FP8 experts get float8_e4m3fn rows ``[M', hidden]`` with float32 scales ``[M', hidden /
    128]``; experts that are not quantized, or quantize for themselves, bfloat16 rows.  Collective:
    all ranks make it, and call its methods, in the same order.

    Args:
        group: torch.distributed process group of the expert-parallel ranks, or a transport.
        moe_config: vLLM's FusedMoEConfig of the layer.
        precision: wire formats of dispatch and combine.

    Raises:
        ValueError: on all ranks alike, if the config asks on one for what is not supported.
    """

    def __init__(
        self,
        group: Any,
        moe_config: Any,
        precision: Precision = Precision(),  # noqa: B008  frozen
    ) -> None:
        """Check the config; then together with the other ranks."""
        super().__init__()
        self._ranks = ranks = transport_of(group)
        agreement.make_on_all(ranks, lambda: _check_moe_config(moe_config, ranks))
        self._a2a = AllToAll(
            ranks,
            num_experts=moe_config.num_experts,
            hidden=moe_config.hidden_dim,
            precision=precision,
            arrive="packed",
            expert_alignment=1,
        )
        placement = Placement(moe_config.num_experts, ranks.num_ranks)
        self._experts = placement.experts(ranks.rank)
        self._elsewhere = _other_than(self._experts, moe_config.num_experts)
        self._expert_map: torch.Tensor | None = None  # that was checked
        self._handle: Handle | None = None  # of the dispatch under way

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        """Rows ``[M', hidden]``, not batched by expert."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        """Return the dtype of topk_ids."""
        return torch.int64

    def max_num_tokens_per_rank(self) -> int | None:
        """Return None: there is no limit."""
        return None

    def num_dispatchers(self) -> int:
        """Return the number of ranks."""
        return self._ranks.num_ranks

    def output_is_reduced(self) -> bool:
        """Say that finalize sums over all ranks."""
        return True

    def supports_async(self) -> bool:
        """Say that shared experts can be computed beside the exchanges."""
        return True

    def supports_dbo(self) -> bool:
        """Say that two micro-batches cannot be under way at a time."""
        return False

    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """Check that the experts can take what arrives.  Collective.

        Raises:
            ValueError: on all ranks alike, if those of one cannot.
        """
        agreement.make_on_all(self._ranks, lambda: self._check_fused_experts(fused_experts))

    def _check_fused_experts(self, fused_experts: mk.FusedMoEExperts) -> None:
        if fused_experts.supports_packed_ue8m0_act_scales():
            raise ValueError(
                "fused_experts: expected ones that take float32 activation scales, got"
                f" {type(fused_experts).__name__}, which takes packed UE8M0 scales"
            )
        if not fused_experts.expects_unquantized_inputs:
            _check_quant_config(fused_experts.quant_config, self._a2a.hidden)

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> mk.PrepareResultType:
        """Dispatch, and wait.  See `prepare_async`."""
        return self.prepare_async(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )()

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> mk.ReceiverType:
        """Start a dispatch.

        Args:
            a1: ``[M, hidden]`` bfloat16.
            topk_weights: ``[M, k]``.
            topk_ids: ``[M, k]`` global expert, or -1.
            num_experts: on all ranks.
            expert_map: ``[num_experts]``, local expert or -1; checked where it is another than
                before.
            apply_router_weight_on_input: multiply a1 by the weights first; k is 1.
            quant_config: of the experts; says how rows arrive.
            defer_input_quant: they quantize for themselves.

        Returns:
            a function that waits, and returns rows ``[M', hidden]``, their scales or None, the
            number of rows of each local expert, ids ``[M', k]`` and weights ``[M', k]``.

        Raises:
            ValueError, TypeError, RuntimeError: on all ranks alike, as `AllToAll.dispatch`, or if
                what one was called with is not supported.
        """
        if apply_router_weight_on_input:
            a1 = a1 * topk_weights[:, :1].to(a1.dtype)

        @contextlib.contextmanager
        def checks() -> Iterator[None]:
            autograd.check_inputs("packed", a1, topk_weights)
            if not defer_input_quant:
                _check_quant_config(quant_config, self._a2a.hidden)
            self._check_experts(num_experts, expert_map)
            if apply_router_weight_on_input and topk_ids.shape[1] != 1:
                raise ValueError(
                    "apply_router_weight_on_input: expected with one expert a token, got"
                    f" {topk_ids.shape[1]}"
                )
            yield

        pending = self._a2a._dispatch(a1, topk_ids, topk_weights, checks(), async_op=True)

        def receive() -> mk.PrepareResultType:
            d = pending.wait()
            self._handle = d.handle
            packed = d.packed
            quantized = not defer_input_quant and quant_config.quant_dtype is not None
            rows, scales = packed.to_fp8_rows() if quantized else (packed.to_bf16(), None)
            return rows, scales, _counts(d), self._global_ids(d.handle), d.handle.topk_weights

        return receive

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> None:
        """Combine, and wait.  See `finalize_async`."""
        self.finalize_async(
            output,
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )()

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> Callable[[], Any]:
        """Start the combine of the last prepare.

        Args:
            output: ``[M, hidden]`` bfloat16, contiguous; the sums are written there.
            fused_expert_output: ``[M', hidden]`` where the experts have summed, else ``[M', k,
                hidden]`` for weight_and_reduce_impl to sum.
            topk_weights: ``[M', k]``, as prepare returned them.
            topk_ids: likewise.
            apply_router_weight_on_input: the weights were applied before.
            weight_and_reduce_impl: of the experts.

        Returns:
            a function that waits.
        """
        if self._handle is None:
            raise RuntimeError("finalize: expected after prepare, and once")
        handle, self._handle = self._handle, None
        rows = fused_expert_output
        if rows.numel():
            if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
                weight_and_reduce_impl = TopKWeightAndReduceContiguous()
            rows = weight_and_reduce_impl.apply(
                output=None,
                fused_expert_output=rows,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                apply_router_weight_on_input=apply_router_weight_on_input,
            )
        return self._a2a.combine_wire_rows(rows, handle, out=output, async_op=True).wait

    def _global_ids(self, handle: Handle) -> torch.Tensor:
        """Return ids of all experts: kernels take no -1, and leave out those that are not local."""
        local = handle.topk_idx
        return torch.where(local == NO_EXPERT, self._elsewhere, local + self._experts.start)

    def _check_experts(self, num_experts: int, expert_map: torch.Tensor | None) -> None:
        if num_experts != self._a2a.num_experts:
            raise ValueError(
                f"num_experts: expected {self._a2a.num_experts} as in moe_config, got {num_experts}"
            )
        if expert_map is None or expert_map is self._expert_map:
            return
        here = [NO_EXPERT] * num_experts
        here[self._experts.start : self._experts.stop] = range(len(self._experts))
        if expert_map.tolist() != here:
            raise ValueError(
                f"expert_map: expected experts {self._experts.start} to {self._experts.stop - 1} on"
                f" this rank, in order (linear placement), got {expert_map.tolist()}"
            )
        self._expert_map = expert_map


def make_prepare_finalize(
    moe_config: Any, wire: WireFormat | str, group: Any = None, *, use_monolithic: bool = False
) -> PrepareAndFinalize:
    """Make what a layer takes, over vLLM's expert-parallel group.  Collective.

    Args:
        moe_config: FusedMoEConfig of the layer.
        wire: format of dispatch.
        group: torch.distributed process group; None: vLLM's expert-parallel one.
        use_monolithic: the experts are vLLM's monolithic ones.

    Raises:
        ValueError: on all ranks alike, if vLLM's config, or that of the layer, asks on one for what
            is not supported.
    """
    if group is None:
        group = all2all_utils.get_ep_group().device_group

    def check_all() -> Precision:
        if use_monolithic:
            raise ValueError(
                "moe_backend: expected modular experts, got monolithic ones, which route inside"
                " their kernel (choose --moe-backend deep_gemm or triton)"
            )
        _check_parallel_config(moe_config.moe_parallel_config)
        _check_vllm_config(all2all_utils.get_current_vllm_config())
        return Precision(dispatch=WireFormat.of(wire, WIRE))

    ranks = transport_of(group)
    return PrepareAndFinalize(ranks, moe_config, agreement.make_on_all(ranks, check_all))


def install(wire: WireFormat | str) -> None:
    """Let every MoE layer that vLLM makes from now on dispatch in the wire format.

    Raises:
        RuntimeError: vLLM's factory is another than this module knows.
    """
    original = all2all_utils.maybe_make_prepare_finalize
    signature = inspect.signature(original)
    missing = {"moe", "use_monolithic"} - set(signature.parameters)
    if missing:
        raise RuntimeError(
            "vllm: expected maybe_make_prepare_finalize(moe, ..., use_monolithic)"
            f" as in 0.33.0, got one without {', '.join(sorted(missing))}"
        )

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> PrepareAndFinalize:
        given = signature.bind(*args, **kwargs).arguments
        use_monolithic = given.get("use_monolithic", False)
        return make_prepare_finalize(given["moe"], wire, use_monolithic=use_monolithic)

    for module in list(sys.modules.values()):  # those that have imported it by name, too
        if vars(module).get("maybe_make_prepare_finalize") is original:
            module.maybe_make_prepare_finalize = make  # type: ignore[attr-defined]


def _counts(d: Dispatched) -> mk.ExpertTokensMetadata:
    """Say how many rows each local expert has, int32 on the device and on the host."""
    on_host = torch.tensor(d.num_rows_list, dtype=torch.int32)
    return mk.ExpertTokensMetadata(d.num_rows.int(), on_host)


def _other_than(local: range, num_experts: int) -> int:
    """Return an expert of another rank; -1 if there is none."""
    if local.start > 0:
        return 0
    return num_experts - 1 if local.stop < num_experts else NO_EXPERT


def _check_parallel_config(parallel: Any) -> None:
    if parallel.all2all_backend != BACKEND:
        raise ValueError(
            f"all2all_backend: expected {BACKEND}, the default, beside {WIRE}, got"
            f" {parallel.all2all_backend}"
        )
    if not parallel.use_all2all_kernels:
        raise ValueError(
            f"{WIRE}: expected --enable-expert-parallel, and tokens that differ between"
            f" ranks (--data-parallel-size > 1), got use_ep={parallel.use_ep}, dp_size="
            f"{parallel.dp_size}, ep_size={parallel.ep_size}"
        )


def _check_vllm_config(config: Any) -> None:
    mode = config.compilation_config.cudagraph_mode
    if mode.name != "NONE":
        raise ValueError(
            f"cudagraph_mode: expected NONE (--enforce-eager), got {mode.name} (the host reads the"
            " counts of each dispatch, which a CUDA graph cannot hold)"
        )
    parallel = config.parallel_config
    if parallel.use_ubatching:
        raise ValueError("enable_dbo, ubatch_size: expected no micro-batches")
    if parallel.expert_placement_strategy != "linear":
        raise ValueError(
            f"expert_placement_strategy: expected linear, got {parallel.expert_placement_strategy}"
        )


def _check_moe_config(config: Any, ranks: Transport) -> None:
    parallel = config.moe_parallel_config
    got = parallel.ep_size, parallel.ep_rank
    if got != (ranks.num_ranks, ranks.rank):
        raise ValueError(
            f"moe_config: expected ep_size {ranks.num_ranks} and ep_rank {ranks.rank} as in group,"
            f" got {got[0]} and {got[1]}"
        )
    if parallel.tp_size != 1:
        raise ValueError(
            f"moe_config: expected whole experts on a rank (tp_size 1), got tp_size"
            f" {parallel.tp_size} (tensor parallelism inside experts; --enable-expert-parallel)"
        )
    if config.in_dtype != torch.bfloat16:
        raise ValueError(f"moe_config: expected in_dtype bfloat16, got {config.in_dtype}")
    if config.is_lora_enabled:
        raise ValueError("moe_config: expected no LoRA, got is_lora_enabled=True")


def _check_quant_config(config: Any, hidden: int) -> None:
    """Check that experts take BF16 rows, quant_dtype being None, or our FP8 rows."""
    if config.quant_dtype is None:
        return
    wanted = (
        config.quant_dtype == torch.float8_e4m3fn
        and config.block_shape == BLOCK_SHAPE
        and config.a1_scale is None
        and not getattr(config, "is_scale_transposed", False)
    )
    if not wanted:
        raise ValueError(
            f"quant_config: expected experts of BF16 rows, or of float8_e4m3fn rows with dynamic"
            f" scales by row and block_shape {BLOCK_SHAPE}, got quant_dtype {config.quant_dtype},"
            f" block_shape {config.block_shape}, static scale {config.a1_scale is not None},"
            f" transposed scales {getattr(config, 'is_scale_transposed', False)}"
        )
    if hidden % FP8_BLOCK:
        raise ValueError(
            f"hidden_dim: expected a multiple of {FP8_BLOCK} where rows arrive as FP8, got {hidden}"
        )
