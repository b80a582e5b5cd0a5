"""Megatron-Core: `use` makes the MoE layers of a model send their tokens through fp4comm.

Run with megatron-core 0.16.1, on CPU ranks and on two H200.  The routing probabilities travel with
the rows, and experts apply them, as Megatron's do; gradients of both go back.  Experts of any kind
get BF16 rows; `SwiGLUExperts` multiply what the wire rows stand for, in FP8 on a Hopper GPU.

Refused when `use` is called: expert tensor parallelism, padding to capacity, shared experts and
expert-parallel communication that overlap with other work, CUDA graphs of an MoE layer, and
parameters that are not BF16.  Token dropping only leaves slots empty, and padding of the rows for
quantization becomes ``expert_alignment``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from fp4comm import agreement, autograd, check, experts, routing
from fp4comm.all_to_all import AllToAll
from fp4comm.dispatched import Dispatched
from fp4comm.integrations import _common

try:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import (
        get_cuda_rng_tracker,
        get_expert_parallel_rng_tracker_name,
    )
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
except ImportError as error:
    raise ImportError(
        "fp4comm.integrations.megatron needs megatron-core with the hooks of release 0.16; pip"
        f" install megatron-core==0.16.1 ({error})"
    ) from error

HOOKS = (
    "dispatch_preprocess",
    "token_dispatch",
    "dispatch_postprocess",
    "combine_preprocess",
    "token_combine",
    "combine_postprocess",
)
lacking = [name for name in HOOKS if not hasattr(MoETokenDispatcher, name)]
if lacking:
    raise ImportError(
        f"megatron-core: expected MoETokenDispatcher with {', '.join(HOOKS)}, as in release"
        f" 0.16.1, got one without {', '.join(lacking)}"
    )


def use(
    model: torch.nn.Module,
    *,
    arrive: str = "bf16",
    expert_alignment: int | None = None,
    **options: Any,
) -> None:
    """Give every MoELayer of a model a `TokenDispatcher` instead of its own.

    Collective over the expert-parallel group, whose layers share a transport.

    Args:
        model: or a chunk of it, as a pipeline stage has them, before its first forward pass.
        arrive: what experts get as rows: ``"bf16"``; or ``"fp8"``, a pair of E4M3 codes and
            float32 scales, as `Dispatched` has them, for experts that take it and need no
            gradients.  Layers with `SwiGLUExperts` have an arrival of their own.
        expert_alignment: rows that each expert's segment starts at a multiple of; what is padded
            counts as rows of the expert, zero and with probability 0.  None: what the layer's
            config wants: 1, or with ``moe_router_padding_for_quantization`` its alignment.
        options: further ones of `AllToAll`: ``precision``, ``route``, ``timeout_s``...

    Raises:
        ValueError: the model has no MoELayer, or a layer what is not supported, see above.
        ValueError, TypeError, TimeoutError: as `AllToAll`.
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if not layers:
        raise ValueError(f"model: expected one with a MoELayer, got {type(model).__name__}")
    timeout_s = options.get("timeout_s", 300.0)
    ranks = _common.transport_of(layers[0].token_dispatcher.ep_group, timeout_s)
    agreement.make_on_all(ranks, lambda: _check_layers(layers, arrive))
    for layer in layers:
        replaced, config = layer.token_dispatcher, layer.config
        a2a = AllToAll(
            _common.transport_of(replaced.ep_group),
            num_experts=config.num_moe_experts,
            hidden=_hidden(config),
            arrive="packed" if isinstance(layer.experts, SwiGLUExperts) else arrive,
            expert_alignment=expert_alignment or _alignment(config),
            **options,
        )
        layer.token_dispatcher = TokenDispatcher(replaced, a2a)


class TokenDispatcher(MoETokenDispatcher):
    """What a MoELayer calls around its experts; `use` puts it there.

    Attributes:
        a2a: the `AllToAll`.
    """

    def __init__(self, replaced: MoETokenDispatcher, a2a: AllToAll) -> None:
        """Take over the process groups of the dispatcher that is replaced."""
        groups = ProcessGroupCollection(
            ep=replaced.ep_group, expt_tp=replaced.tp_group, tp_ep=replaced.tp_ep_group
        )
        super().__init__(replaced.config, groups)
        self.a2a = a2a

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn the map of each token's experts into their numbers.

        Args:
            hidden_states: ``[..., hidden]`` bfloat16.
            routing_map: ``[T, num_experts]`` bool, at most ``moe_router_topk`` true in a row.
            probs: ``[T, num_experts]``.

        Returns:
            ``[T, hidden]``, and the probabilities ``[T, K]``.
        """
        self.hidden_shape, self.routing_map = hidden_states.shape, routing_map.bool().contiguous()
        topk = self.config.moe_router_topk
        self.topk_idx, columns = routing.chosen_experts(self.routing_map, topk)
        weights = probs.gather(1, columns)
        return hidden_states.reshape(-1, self.hidden_shape[-1]), weights

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[Any, torch.Tensor]:
        """Send tokens and probabilities; return rows by expert, and the probability of each.

        Raises:
            ValueError, TypeError, RuntimeError: on all ranks alike, as `AllToAll.dispatch`, or if
                a token has more experts than the config says.
        """
        checks = self._checked(hidden_states, probs)
        pending = self.a2a._dispatch(hidden_states, self.topk_idx, probs, checks)
        self.dispatched: Dispatched | None = pending.wait()
        return self.dispatched.rows, self.dispatched.row_weights

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Return rows, the number of them for each expert, ``[E_l]`` on the CPU, and ``probs``.

        Rows are a tensor if they arrive as BF16, ``(rows, scales)`` as FP8, and for
        `SwiGLUExperts` the `AllToAll` and what was dispatched.
        """
        d = self.dispatched
        assert d is not None
        rows: Any = {"bf16": hidden_states, "fp8": (d.rows, d.scales), "packed": (self.a2a, d)}
        counts = np.diff(d.handle.layout.expert_offsets_array)
        return rows[self.a2a.arrive], torch.from_numpy(counts), probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs as they are."""
        return hidden_states

    def token_combine(
        self,
        hidden_states: torch.Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> torch.Tensor:
        """Send the outputs back and sum them: the experts have applied the probabilities."""
        d, self.dispatched = self.dispatched, None
        assert d is not None
        return self.a2a.combine(hidden_states, d.handle, weighted=False)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return them in the shape that came in."""
        return hidden_states.view(self.hidden_shape)

    @contextlib.contextmanager
    def _checked(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Iterator[None]:
        """Check what AllToAll does not, for all ranks to raise together."""
        arrive, num_experts = self.a2a.arrive, self.routing_map.shape[1]
        autograd.check_inputs("bf16" if arrive == "packed" else arrive, hidden_states, probs)
        if num_experts != self.a2a.num_experts:
            raise ValueError(
                f"routing_map: expected {self.a2a.num_experts} columns, one an expert, got"
                f" {num_experts}"
            )
        try:
            yield
        except ValueError as error:  # the index of a token with too many is no expert
            topk, num_chosen = self.config.moe_router_topk, self.routing_map.sum(1)
            if len(num_chosen) and (most := int(num_chosen.max())) > topk:
                raise ValueError(
                    f"routing_map: expected at most moe_router_topk = {topk} experts a token, got"
                    f" {most}"
                ) from error
            raise


class SwiGLUExperts(MegatronModule):
    """SwiGLU experts of `fp4comm.experts`, for ``MoESubmodules(experts=SwiGLUExperts)``.

    They keep the wire rows for backward, 4 bits an element in mxfp4, and multiply in FP8 where
    that function does.  Wants ``gated_linear_unit``, ``activation_func=silu`` and no bias; and
    `use`.  Distributed checkpoints hold each tensor with the experts of all ranks in dimension 0.

    Attributes:
        gate_up: ``[E_l, 2 * moe_ffn_hidden_size, hidden]``, gate before up.
        down: ``[E_l, hidden, moe_ffn_hidden_size]``.
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any = None) -> None:
        """Make the parameters, and initialize them as Megatron does its own experts'."""
        super().__init__(config)
        silu = torch.nn.functional.silu
        _expect(config, gated_linear_unit=True, activation_func=silu, add_bias_linear=False)
        self.groups = pg_collection
        inner, hidden = config.moe_ffn_hidden_size, _hidden(config)
        shape, init = (num_local_experts, 2 * inner, hidden), config.init_method
        self.gate_up = _parameter(shape, init, config)
        shape, init = (num_local_experts, hidden, inner), config.output_layer_init_method
        self.down = _parameter(shape, init, config)

    def forward(
        self,
        arrived: tuple[AllToAll, Dispatched],
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Apply the experts, and the probabilities; return the outputs, and no bias."""
        if not isinstance(arrived, tuple):
            raise TypeError(
                "SwiGLUExperts: expected a layer that fp4comm.integrations.megatron.use was called"
                f" for, got rows as {type(arrived).__name__}"
            )
        return experts.apply(*arrived, self.gate_up, self.down), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Say which experts of the whole are here, for a distributed checkpoint."""
        num_before = len(sharded_offsets)
        here = num_before, self.groups.ep.rank(), self.groups.ep.size()
        return {
            prefix + name: ShardedTensor.from_rank_offsets(
                prefix + name,
                parameter,
                *sharded_offsets,
                here,
                replica_id=(0, 0, self.groups.expt_dp.rank()),
                prepend_axis_num=num_before,
            )
            for name, parameter in self.named_parameters()
        }

    def backward_dw(self) -> None:
        """Do nothing: backward has made the weights' gradients."""


def _parameter(
    shape: tuple[int, ...], init: Callable[[torch.Tensor], Any], config: Any
) -> torch.nn.Parameter:
    """Make the weights of the local experts; one is initialized after the other."""
    cpu = config.use_cpu_initialization
    device = torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())
    values = torch.empty(shape, dtype=config.params_dtype, device=device)
    if config.perform_initialization:
        name = get_expert_parallel_rng_tracker_name()
        with contextlib.nullcontext() if cpu else get_cuda_rng_tracker().fork(name):
            for value in values:
                init(value)
    parameter = torch.nn.Parameter(values)
    # By which Megatron tells parameters that ranks of the group do not share.
    parameter.allreduce = config.expert_model_parallel_size <= 1  # type: ignore[attr-defined]
    return parameter


def _hidden(config: Any) -> int:
    """Return the width of what is dispatched."""
    return getattr(config, "moe_latent_size", None) or config.hidden_size


def _alignment(config: Any) -> int:
    """Return the multiple that the config wants the rows of an expert to be padded to."""
    padded = getattr(config, "moe_router_padding_for_quantization", False)
    return get_align_size_for_quantization(config) if padded else 1


def _check_layers(layers: list[MoELayer], arrive: str) -> None:
    for layer in layers:
        _check_layer(layer)
    check.one_of("arrive", arrive, ("bf16", "fp8"))


def _check_layer(layer: MoELayer) -> None:
    config = layer.config
    tp_size = layer.token_dispatcher.tp_size
    if tp_size != 1:
        raise ValueError(
            f"expert_tensor_parallel_size: expected 1, got {tp_size} (an expert has to be on one"
            " rank as a whole)"
        )
    _expect(
        config,
        params_dtype=torch.bfloat16,
        moe_pad_expert_input_to_capacity=False,
        moe_shared_expert_overlap=False,
        overlap_moe_expert_parallel_comm=False,
    )
    if getattr(config, "cuda_graph_impl", "none") != "none":
        scopes = [scope.name for scope in config.cuda_graph_scope]
        if not scopes or any("moe" in name or "full" in name for name in scopes):
            raise ValueError(
                "cuda_graph_scope: expected none of an MoE layer (the counts are read by the"
                f" host), got {', '.join(scopes) or 'the whole layer'}"
            )


def _expect(config: Any, **wanted: Any) -> None:
    for name, value in wanted.items():
        got = getattr(config, name, value)
        if got != value:
            raise ValueError(f"{name}: expected {value} with fp4comm, got {got}")
