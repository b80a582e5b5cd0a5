"""Either route, by counts and links: all ranks choose alike, since they know the same counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from fp4comm.hops.flat import FlatDraft, FlatRoute
from fp4comm.hops.two_hop import TwoHopDraft, TwoHopRoute
from fp4comm.routing import RoutePlan

MOST = 1e9  # of a link's numbers


@dataclasses.dataclass(frozen=True)
class Links:
    """What a rank's exchanges reach, in GB/s = 10^9 B/s, and what the second hop costs besides.

    The defaults are those of the topology hgx-h100-400g; `Topology.links` has those of others, and
    of a machine that ``fp4comm bench --calibrate`` has measured.

    Attributes:
        inside_gbs: to other ranks of its node.
        between_gbs: to other nodes.
        hop_us: of another exchange, for its launches and latency.
    """

    inside_gbs: float = 285.3
    between_gbs: float = 48.0
    hop_us: float = 31.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"links: {name}: expected a number, got {type(value).__name__}")
            if not 0 < value <= MOST:
                raise ValueError(f"links: {name}: expected 0 < {name} <= {MOST:g}, got {value}")


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Wire rows that the tokens of a rank need, by either route.

    Attributes:
        flat_between: to other nodes, by the flat route.
        flat_inside: to other ranks of its node.
        two_hop_between: to other nodes, by the two-hop route.
        two_hop_inside: to the other ranks of a node, from the relay there.
    """

    flat_between: int
    flat_inside: int
    two_hop_between: int
    two_hop_inside: int


def two_hop_is_faster(rows: Crossing, row_bytes: int, links: Links) -> bool:
    """Compare the times that the rows take: the flat route uses both links at once, the other not.

    Example: top-8 over 2 nodes of 4 ranks, 7168 in mxfp4.  4096 tokens send 10800 rows to the other
    node and 8100 within theirs; or 4080, and then 16200 within nodes:
        >>> two_hop_is_faster(Crossing(10800, 8100, 4080, 16200), 3808, Links())
        True
        >>> two_hop_is_faster(Crossing(11, 8, 4, 16), 3808, Links())
        False
    """
    inside_us, between_us = (
        row_bytes / (1e3 * gbs) for gbs in (links.inside_gbs, links.between_gbs)
    )
    flat_us = max(rows.flat_between * between_us, rows.flat_inside * inside_us)
    two_hop_us = rows.two_hop_between * between_us + rows.two_hop_inside * inside_us
    return two_hop_us + links.hop_us < flat_us


@dataclasses.dataclass(frozen=True, eq=False)
class AutoDraft:
    """Both drafts; see `hops.Draft`."""

    flat: FlatDraft
    two_hop: TwoHopDraft
    faster: Callable[[Crossing], bool]
    plan: RoutePlan | None = None

    @property
    def num_topk(self) -> int:
        """K."""
        return self.flat.num_topk

    @property
    def counts(self) -> np.ndarray:
        """Of the two-hop route, and this rank's `Crossing` for everybody."""
        counts = self.two_hop.counts
        own = [*vars(self._crossing()).values()]
        return np.concatenate([counts, np.tile(own, (len(counts), 1))], axis=1)

    def settled(self, counts: np.ndarray) -> FlatDraft | TwoHopDraft:
        """Choose, as all ranks do."""
        first = self.two_hop.counts.shape[1]
        busiest = Crossing(*counts[:, first:].max(axis=0).tolist())
        return self.two_hop if self.faster(busiest) else self.flat

    def _crossing(self) -> Crossing:
        """Count the rows of this rank's tokens."""
        route, rows = self.two_hop.route, self.two_hop.of_ranks[:, 0]
        own_node = int(route.nodes.of_rank[route.rank])
        total, inside = int(rows.sum()), int(rows[route.own_ranks].sum())
        to_nodes = self.two_hop.plan.send_splits
        return Crossing(
            flat_between=total - inside,
            flat_inside=inside - int(rows[route.rank]),
            two_hop_between=int(to_nodes.sum() - to_nodes[own_node]),
            two_hop_inside=total - int(rows[route.my_relays].sum()),
        )


@dataclasses.dataclass(frozen=True)
class AutoRoute:
    """Plans dispatches by both routes."""

    flat: FlatRoute
    two_hop: TwoHopRoute
    faster: Callable[[Crossing], bool]

    def draft(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None) -> AutoDraft:
        """Plan what this rank sends, by either."""
        flat = self.flat.draft(topk_idx, topk_weights)
        two_hop = self.two_hop.draft_of(flat.counts, topk_idx, topk_weights)
        return AutoDraft(flat, two_hop, self.faster)
