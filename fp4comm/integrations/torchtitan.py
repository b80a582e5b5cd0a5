"""torchtitan: an override that makes its MoE layers send their tokens through fp4comm.

    --override.imports fp4comm.integrations.torchtitan.dispatcher

Run with torchtitan 0.3.0, on CPU ranks and on two H200.  Rows arrive in BF16, for any experts;
gradients go back to the tokens and to the routing scores, which combine applies.  It wants expert
parallelism and eager execution: no "model" in ``compile.components``, no CUDA graphs, and no SPMD
type checks.  Tensor and context parallelism of what surrounds the experts, FSDP, pipelines and
activation checkpointing, which makes the exchanges again where it recomputes them, need nothing of
the dispatcher.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fp4comm.all_to_all import AllToAll
from fp4comm.dispatched import Handle
from fp4comm.integrations import _common
from fp4comm.precision import Precision

try:
    import spmd_types
    from torchtitan.config import override
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.common.token_dispatcher import (
        AllToAllTokenDispatcher,
        BaseEPTokenDispatcher,
        TorchAOTokenDispatcher,
    )
except ImportError as error:
    raise ImportError(
        "fp4comm.integrations.torchtitan needs torchtitan with the overrides and dispatchers of"
        f" release 0.3; pip install torchtitan==0.3.0 ({error})"
    ) from error


class TokenDispatcher(BaseEPTokenDispatcher):
    """What `RoutedExperts` call around their experts; `dispatcher` puts it there.

    Attributes:
        a2a: the `AllToAll`, from `wire_meshes` on.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """Config of the dispatcher.

        Args:
            hidden: elements in a token.
            precision: wire format of each pass and direction.
            expert_alignment: rows that each expert's segment starts at a multiple of; what is
                padded counts as rows of the expert, and is zero.
            options: further ones of `AllToAll`: ``route``, ``timeout_s``...
        """

        hidden: int
        precision: Precision = Precision()
        expert_alignment: int = 1
        options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        """Note the config; ranks come with `wire_meshes`."""
        super().__init__(config)
        self.config = config

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        """Make the `AllToAll` over the ranks that share the experts.  Collective.

        Raises:
            ValueError: there is no expert parallelism.
            ValueError, TypeError, TimeoutError: as `AllToAll`.
        """
        if ep_mesh is None:
            raise ValueError(
                "expert_parallel_degree: expected more than 1 with fp4comm's dispatcher, got 1"
            )
        super().wire_meshes(ep_mesh=ep_mesh)
        config = self.config
        self.a2a = AllToAll(
            _common.transport_of(ep_mesh.get_group()),
            num_experts=config.num_experts,
            hidden=config.hidden,
            precision=config.precision,
            arrive="bf16",
            expert_alignment=config.expert_alignment,
            **config.options,
        )

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor, Handle]:
        """Send tokens to their experts; shapes as torchtitan's names say.

        Returns:
            rows by expert, ``[R, D]`` bfloat16; how many each local expert has, padding included,
            ``[e]``; and what `combine` needs.

        Raises:
            RuntimeError: under torch.compile, or where SPMD types are checked.
            ValueError, TypeError, TimeoutError: as `AllToAll.dispatch`.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError(
                'compile.components: expected without "model" with fp4comm\'s dispatcher (the host'
                " reads the counts, and an exchange is not compiled)"
            )
        if spmd_types.is_type_checking():
            raise RuntimeError(
                "debug.spmd_typechecking: expected False with fp4comm's dispatcher, got True (rows"
                " that arrive have no SPMD type)"
            )
        d = self.a2a.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK)
        is_padded = self.config.expert_alignment > 1
        counts = d.expert_offsets.diff() if is_padded else d.num_rows.clone()
        return d.rows, counts, d.handle

    def combine(
        self,
        routed_output_RD: torch.Tensor,
        metadata: Handle,
        x_TD: torch.Tensor,
    ) -> torch.Tensor:
        """Send the outputs back, multiplied by their scores and summed: ``[T, D]``."""
        return self.a2a.combine(routed_output_RD, metadata).to(x_TD.dtype)


@override(target=RoutedExperts.Config, description="Quantized all-to-all of fp4comm.")
def dispatcher(
    config: RoutedExperts.Config,
    *,
    expert_alignment: int | None = None,
    options: dict[str, Any] | None = None,
    **precision: Any,
) -> RoutedExperts.Config:
    """Give the experts a `TokenDispatcher` instead of the all-to-all one.

    Args:
        config: has the all-to-all dispatcher, with or without padding for quantized experts.
        expert_alignment: see `TokenDispatcher.Config`; None: the padding of what is replaced, or 1.
        options: see there.
        precision: fields of `Precision`: ``dispatch``, ``combine``...

    Raises:
        ValueError: the dispatcher is another one.
    """
    replaced = config.token_dispatcher
    if not isinstance(replaced, AllToAllTokenDispatcher.Config):
        raise ValueError(
            "token_dispatcher: expected AllToAllTokenDispatcher.Config (comm_backend"
            f' "standard"), got {type(replaced).__qualname__}'
        )
    if expert_alignment is None:
        padded = isinstance(replaced, TorchAOTokenDispatcher.Config)
        expert_alignment = replaced.pad_multiple if padded else 1
    ours = TokenDispatcher.Config(
        num_experts=replaced.num_experts,
        top_k=replaced.top_k,
        hidden=config.inner_experts.dim,
        precision=Precision(**precision),
        expert_alignment=expert_alignment,
        options=options or {},
    )
    return dataclasses.replace(config, token_dispatcher=ours)
