"""The flat route: one exchange, each token straight to every rank that has its experts."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from fp4comm import routing
from fp4comm.hops.way import Exchange, Merge, Rows
from fp4comm.routing import ExpertLayout, Placement, RoutePlan


@dataclasses.dataclass(frozen=True, eq=False)
class FlatWay:
    """The rows that this rank sends to each, and gets from each; see `hops.Way`."""

    send_splits: np.ndarray
    recv_splits: np.ndarray

    @property
    def hops(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rows to and from each rank."""
        return [(self.send_splits, self.recv_splits)]

    @property
    def tables(self) -> list[torch.Tensor]:
        """None."""
        return []

    def forth(self, streams: Rows, exchange: Exchange) -> Rows:
        """Send wire rows to the ranks of their experts."""
        return exchange(streams, self.send_splits, self.recv_splits)

    def back(self, streams: Rows, exchange: Exchange, merge: Merge) -> Rows:
        """Send rows back; nobody merges any."""
        del merge
        return exchange(streams, self.recv_splits, self.send_splits)

    def layout(
        self, route: torch.Tensor, num_topk: int, num_rows: np.ndarray, alignment: int
    ) -> ExpertLayout:
        """Lay out the rows that arrived, by source rank and token."""
        return routing.expert_layout(route, num_topk, num_rows, alignment)


@dataclasses.dataclass(frozen=True, eq=False)
class FlatDraft:
    """What this rank sends; see `hops.Draft`."""

    plan: RoutePlan

    @property
    def num_topk(self) -> int:
        """K."""
        return self.plan.num_topk

    @property
    def counts(self) -> np.ndarray:
        """For each rank its wire rows, then rows of each expert there."""
        return self.plan.counts

    def settled(self, counts: np.ndarray) -> FlatDraft:
        """Return itself."""
        del counts
        return self

    def send(self, counts: np.ndarray, sent: Rows, exchange: Exchange) -> tuple[FlatWay, Rows]:
        """Send rows and route."""
        way = FlatWay(self.plan.send_splits, counts[:, 0])
        return way, way.forth([*sent, self.plan.route], exchange)


@dataclasses.dataclass(frozen=True)
class FlatRoute:
    """Plans dispatches by the flat route."""

    placement: Placement

    def draft(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None) -> FlatDraft:
        """Plan what this rank sends."""
        return FlatDraft(routing.plan(topk_idx, topk_weights, self.placement))
