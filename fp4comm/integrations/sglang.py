"""SGLang: tokens go to their experts in 4 bits, and SGLang's own runners compute on the FP8 rows.

Run with SGLang 0.5.23, on CPU ranks: its settings, plugin hooks, factory, base class and types,
with experts in plain torch in place of its runners.  Not run, since they need a GPU: those runners
(DeepGEMM), its layers around them, and a server.

In a server, with fp4comm installed beside SGLang::

    FP4COMM_WIRE=mxfp4 python -m sglang.launch_server --model-path MODEL --tp-size 8 --ep-size 8 \\
        --moe-a2a-backend deepep --deepep-mode normal

SGLang takes all-to-all backends from a closed list.  So the plugin, an entry point of group
``sglang.srt.plugins``, registers a hook around SGLang's `create_moe_dispatcher`; where FP4COMM_WIRE
is not set it does nothing.  With the backend "deepep" SGLang prepares its layers for the format
DEEPEP_NORMAL, which this dispatcher gives; the package deep_ep is not used.

Eager only: the host reads the counts, so that a CUDA graph cannot hold it.  SGLang switches the
graphs of decoding off for ``--deepep-mode normal``, which is the only mode that this takes.  No
overlap of two batches (TBO) or within one (SBO), and no packed UE8M0 scales (Blackwell's DeepGEMM).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fp4comm import AllToAll, Precision, WireFormat, agreement, autograd
from fp4comm.dispatched import Handle
from fp4comm.formats import FP8_BLOCK
from fp4comm.integrations._common import WIRE, transport_of
from fp4comm.routing import Placement

try:
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
    from sglang.srt.layers.moe.token_dispatcher.deepep import (
        DeepEPNormalCombineInput,
        DeepEPNormalDispatchOutput,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
except ImportError as error:
    raise ImportError(
        "fp4comm.integrations.sglang: expected SGLang with BaseDispatcher,"
        " DeepEPNormalDispatchOutput and HookRegistry (0.5.23 has them); importing them failed with"
        f" {type(error).__name__}: {error}"
    ) from error

FACTORY = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"
DEEP_GEMM_ROWS = 128  # that each expert's rows are padded to there


class Dispatcher(BaseDispatcher):
    """Quantized dispatch and combine in SGLang's format DEEPEP_NORMAL.

    Rows arrive once for each token and rank, ``[N, hidden]``: float8_e4m3fn with float32 scales
    ``[N, hidden / 128]``, or bfloat16 where SGLang's own rule for DeepEP says so.  The runner
    weights and sums the outputs of a row.  Collective: all ranks make it, and call its methods, in
    the same order.

    Args:
        group: torch.distributed process group of the expert-parallel ranks, or a transport.
        num_experts: on all ranks.
        num_local_experts: on this one.
        hidden_size: elements in a token.
        params_dtype: of the layer's activations.
        runner_backend: of the layer; it and quant_config choose how rows arrive.
        precision: wire formats of dispatch and combine.

    Raises:
        ValueError: on all ranks alike, if one has sizes, or settings of SGLang's, that are not
            supported.
    """

    def __init__(
        self,
        group: Any,
        *,
        num_experts: int,
        num_local_experts: int,
        hidden_size: int,
        params_dtype: torch.dtype = torch.bfloat16,
        runner_backend: Any = None,
        precision: Precision = Precision(),  # noqa: B008  frozen
    ) -> None:
        """Check settings and sizes together with the other ranks."""
        super().__init__()
        self.runner_backend = runner_backend
        self._hidden = hidden_size
        ranks = transport_of(group)

        def check_all() -> None:
            _check_settings()
            local = Placement(num_experts, ranks.num_ranks).num_local_experts(ranks.rank)
            if num_local_experts != local:
                raise ValueError(
                    f"num_local_experts: expected {local} of {num_experts} experts, got"
                    f" {num_local_experts} (tensor parallelism inside experts is not supported:"
                    " --ep-size as --tp-size)"
                )
            if params_dtype != torch.bfloat16:
                raise ValueError(f"params_dtype: expected bfloat16, got {params_dtype}")
            self._rows_arrive_as_fp8()

        agreement.make_on_all(ranks, check_all)
        self._a2a = AllToAll(
            ranks,
            num_experts=num_experts,
            hidden=hidden_size,
            precision=precision,
            arrive="packed",
            expert_alignment=DEEP_GEMM_ROWS if deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM else 1,
        )
        self._handle: Handle | None = None  # of the dispatch under way

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> DeepEPNormalDispatchOutput:
        """Send the tokens to their experts.

        Args:
            hidden_states: ``[T, hidden]`` bfloat16.
            topk_output: has topk_weights ``[T, K]`` and topk_ids ``[T, K]``, global or -1.

        Returns:
            rows ``[N, hidden]``, scales or None, topk_ids ``[N, K]`` int64, local or -1,
            topk_weights ``[N, K]`` float32, and the number of rows of each local expert, rounded
            up to 128 if DeepGEMM is in use.

        Raises:
            ValueError, TypeError, RuntimeError: on all ranks alike, as `AllToAll.dispatch`, or if
                the experts of one want other rows than FP8 or BF16 ones.
        """
        idx, weights = topk_output.topk_ids, topk_output.topk_weights

        @contextlib.contextmanager
        def checks() -> Iterator[None]:
            autograd.check_inputs("packed", hidden_states, weights)
            self._rows_arrive_as_fp8()
            yield

        d = self._a2a._dispatch(hidden_states, idx, weights, checks()).wait()
        self._handle = d.handle
        packed = d.packed
        quantized = self._rows_arrive_as_fp8()
        rows, scales = packed.to_fp8_rows() if quantized else (packed.to_bf16(), None)
        offsets = d.handle.layout.expert_offsets_array
        num_rows = (offsets[1:] - offsets[:-1]).tolist()
        route = d.handle.topk_idx, d.handle.topk_weights
        return DeepEPNormalDispatchOutput(rows, scales, *route, num_rows)

    def combine(self, combine_input: DeepEPNormalCombineInput) -> torch.Tensor:
        """Send the sums of the rows back, and sum those of each token.

        Args:
            combine_input: has hidden_states ``[N, hidden]`` bfloat16.

        Returns:
            ``[T, hidden]`` bfloat16.
        """
        if not combine_input.format.name == "DEEPEP_NORMAL":
            raise ValueError(
                f"combine_input: expected format DEEPEP_NORMAL, got {combine_input.format.name}"
            )
        if self._handle is None:
            raise RuntimeError("combine: expected after dispatch, and once")
        handle, self._handle = self._handle, None
        return self._a2a.combine_wire_rows(combine_input.hidden_states, handle)

    def set_overlap_args(self, combine_overlap_args: Any, meta_overlap_args: dict) -> None:
        """Refuse: combine does not overlap with the down projection."""
        raise RuntimeError("set_overlap_args: expected no single-batch overlap (SBO)")

    def _rows_arrive_as_fp8(self) -> bool:
        wanted = utils.get_deepep_output_dtype(self).value
        if wanted not in ("fp8", "bf16"):
            raise ValueError(f"quant_config: expected rows wanted as fp8 or bf16, got {wanted}")
        if wanted == "bf16":
            return False
        if self._hidden % FP8_BLOCK:
            raise ValueError(
                f"hidden_size: expected a multiple of {FP8_BLOCK} where rows arrive as FP8, got"
                f" {self._hidden}"
            )
        if deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0:
            raise ValueError(
                "DEEPGEMM_SCALE_UE8M0: expected experts that take float32 scales, got ones that"
                " take packed UE8M0 scales"
            )
        return True


def make_dispatcher(runner_config: Any, wire: WireFormat | str, group: Any = None) -> Dispatcher:
    """Make what a layer takes, over SGLang's expert-parallel group.  Collective.

    Args:
        runner_config: MoeRunnerConfig of the layer.
        wire: format of dispatch.
        group: torch.distributed process group; None: the one that SGLang gives DeepEP.

    Raises:
        ValueError: on all ranks alike, if one has settings that are not supported.
    """
    if group is None:
        group = utils.get_parallel().tp_group.device_group
    ranks = transport_of(group)

    def check_all() -> Precision:
        _check_backend()
        return Precision(dispatch=WireFormat.of(wire, WIRE))

    precision = agreement.make_on_all(ranks, check_all)
    return Dispatcher(
        ranks,
        num_experts=runner_config.num_experts,
        num_local_experts=runner_config.num_local_experts,
        hidden_size=runner_config.hidden_size,
        params_dtype=runner_config.params_dtype,
        runner_backend=runner_config.runner_backend,
        precision=precision,
    )


def install(wire: WireFormat | str) -> None:
    """Let every MoE layer that SGLang makes from now on dispatch in the wire format.

    For a plugin: SGLang applies the hook when it has loaded all of them.  The dispatchers check the
    format, since SGLang goes on after an error of a plugin.
    """

    def make(original: Any, moe_runner_config: Any, *_: Any, **__: Any) -> Dispatcher:
        return make_dispatcher(moe_runner_config, wire)

    HookRegistry.register(FACTORY, make, HookType.AROUND)


def _check_backend() -> None:
    backend = utils.get_moe_a2a_backend()
    if not backend.is_deepep():
        raise ValueError(f"moe_a2a_backend: expected deepep beside {WIRE}, got {backend.value}")
    if not utils.get_deepep_mode().is_normal():
        raise ValueError(
            f"deepep_mode: expected normal, got {utils.get_deepep_mode().value} (the host reads the"
            " counts of each dispatch, which a CUDA graph cannot hold)"
        )


def _check_settings() -> None:
    if utils.is_tbo_enabled():
        raise ValueError("enable_two_batch_overlap: expected off, got on")
    if utils.is_sbo_enabled():
        raise ValueError("enable_single_batch_overlap: expected off, got on")
