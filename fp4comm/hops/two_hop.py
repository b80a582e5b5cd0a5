"""The two-hop route: a token crosses the network once a node, and goes on from there.

    source --hop 1--> relay on each node --hop 2--> ranks of that node that have its experts
           <--hop 2--                    <--hop 1--

Rows stay packed.  Who relays for whom stands in `Nodes.relays`.  The relay plans anew, from the
route that came, over the ranks of its node; how many rows it hands on to each, and each gets from
it, the counts have told before hop 1, so that nothing waits in between.

On the way back the relay sums the rows of a token in float32, by ascending rank, and rounds the sum
to the wire; the source then sums by ascending node.  Rows come to a rank by relay, then source,
then token; the layout puts them into the order of the flat route.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch

from fp4comm import check, codec, routing
from fp4comm.hops.nodes import Nodes
from fp4comm.hops.way import Exchange, Merge, Rows
from fp4comm.routing import ExpertLayout, Placement, RelayPlan, RoutePlan

HOP_1, HOP_2 = ", hop 1", ", hop 2"  # what is added to an exchange's label


@dataclasses.dataclass(frozen=True, eq=False)
class Splits:
    """Rows of the exchanges forth, ``[num_ranks]`` int64 each.

    Attributes:
        to_relays: hop 1, rows that this rank sends to each.
        to_relay: hop 1, rows that it takes in from each, as their relay.
        from_relay: hop 2, rows that it hands on to each.
        from_relays: hop 2, rows that arrive from each.
    """

    to_relays: np.ndarray
    to_relay: np.ndarray
    from_relay: np.ndarray
    from_relays: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class TwoHopWay:
    """How the rows of one dispatch went; see `hops.Way`.

    Attributes:
        splits: of its exchanges.
        relay: what this rank hands on.
        recv_splits: ``[num_ranks]`` int64, rows that arrived by their source.
        arrival: ``[num_ranks]``, the sources in the order in which their rows arrived.
        route: of the `AllToAll`.
    """

    splits: Splits
    relay: RelayPlan
    recv_splits: np.ndarray
    arrival: np.ndarray
    route: TwoHopRoute

    @property
    def hops(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rows to and from each rank, of both hops."""
        s = self.splits
        return [(s.to_relays, s.to_relay), (s.from_relay, s.from_relays)]

    @property
    def tables(self) -> list[torch.Tensor]:
        """What the relay reads."""
        return [self.relay.place_offsets, self.relay.places, self.relay.row_tokens]

    def forth(self, streams: Rows, exchange: Exchange) -> Rows:
        """Send wire rows to the relays, and on to the ranks of their experts."""
        s = self.splits
        with exchange.beside(self.route.stream, *streams, *self.tables):
            rows = exchange(streams, s.to_relays, s.to_relay, HOP_1, is_last=False)
            with exchange.phase("relay", ""):
                rows = _copies(rows, self.relay)
            return exchange(rows, s.from_relay, s.from_relays, HOP_2)

    def back(self, streams: Rows, exchange: Exchange, merge: Merge) -> Rows:
        """Send rows to the relays they came from, merge them there, and send on to the sources."""
        s = self.splits
        with exchange.beside(self.route.stream, *streams, *self.tables):
            rows = exchange(streams, s.from_relays, s.from_relay, HOP_1, is_last=False)
            with exchange.phase("relay", ""):
                rows = merge(rows, self.relay)
            return exchange(rows, s.to_relay, s.to_relays, HOP_2)

    def layout(
        self, route: torch.Tensor, num_topk: int, num_rows: np.ndarray, alignment: int
    ) -> ExpertLayout:
        """Lay out the rows that arrived as if they had come by source rank and token."""
        order, position = _orders(self.recv_splits, self.arrival, route.device)
        by_source = route.index_select(0, order)
        layout = routing.expert_layout(by_source, num_topk, num_rows, alignment)
        behind = torch.cat([order, order.new_full((1,), -1)])  # which -1 stands for
        weights = layout.weights
        return dataclasses.replace(
            layout,
            slot_rows=layout.slot_rows.index_select(0, position),
            weights=None if weights is None else weights.index_select(0, position),
            row_source=behind[layout.row_source.long()].int(),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TwoHopDraft:
    """What this rank sends; see `hops.Draft`.

    Attributes:
        plan: over the nodes instead of the ranks, its experts numbered within a node.
        of_ranks: ``[num_ranks, 1 + E]`` int64, counts of the flat route.
        route: of the `AllToAll`.
    """

    plan: RoutePlan
    of_ranks: np.ndarray
    route: TwoHopRoute

    @property
    def num_topk(self) -> int:
        """K."""
        return self.plan.num_topk

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Of the flat route; then, for a relay, rows that come to it and go on to each rank."""
        nodes, relays = self.route.nodes, self.route.my_relays
        relayed = np.zeros((len(self.of_ranks), 1 + max(nodes.sizes)), np.int64)
        relayed[relays, 0] = self.plan.send_splits
        for node, relay in enumerate(relays.tolist()):
            relayed[relay, 1 : 1 + nodes.sizes[node]] = self.of_ranks[nodes.ranks(node), 0]
        return np.concatenate([self.of_ranks, relayed], axis=1)

    def settled(self, counts: np.ndarray) -> TwoHopDraft:
        """Return itself."""
        del counts
        return self

    def send(self, counts: np.ndarray, sent: Rows, exchange: Exchange) -> tuple[TwoHopWay, Rows]:
        """Send rows and route to the relays; plan what came there, and hand it on."""
        s = self.splits(counts)
        with exchange.beside(self.route.stream, *sent, self.plan.route):
            streams = [*sent, self.plan.route]
            *rows, route = exchange(streams, s.to_relays, s.to_relay, HOP_1, is_last=False)
            with exchange.phase("relay", ""):
                relay, route = self.route.relay(route, self.num_topk, s.from_relay)
                rows = [*_copies(rows, relay), route]
            received = exchange(rows, s.from_relay, s.from_relays, HOP_2)
        way = TwoHopWay(s, relay, counts[:, 0], self.route.arrival, self.route)
        return way, received

    def splits(self, counts: np.ndarray) -> Splits:
        """Work out the rows of both hops from the counts of all ranks."""
        own, my_relays = self.route.own_ranks, self.route.my_relays
        relayed = counts[:, self.of_ranks.shape[1] :]
        to_relays, from_relay, from_relays = np.zeros((3, len(counts)), np.int64)
        to_relays[my_relays] = self.plan.send_splits
        from_relay[own] = relayed[:, 1 : 1 + own.stop - own.start].sum(axis=0)
        np.add.at(from_relays, self.route.relay_of_source, counts[:, 0])
        return Splits(to_relays, relayed[:, 0], from_relay, from_relays)


class TwoHopRoute:
    """Plans dispatches by the two-hop route.

    Args:
        placement: where the experts are.
        nodes: where the ranks are.
        rank: this one.

    Raises:
        ValueError: a node has more experts than the route stream can number.

    Attributes:
        own_ranks: ranks of this node.
        my_relays: ``[num_nodes]``, who relays for this rank.
        relay_of_source: ``[num_ranks]``, who relays to this node for each source.
        arrival: ``[num_ranks]``, the sources in the order in which their rows arrive here.
    """

    def __init__(self, placement: Placement, nodes: Nodes, rank: int) -> None:
        """Work out who relays for whom."""
        node = int(nodes.of_rank[rank])
        self.placement, self.nodes, self.rank = placement, nodes, rank
        self.own_ranks = nodes.ranks(node)
        self.my_relays = nodes.relays[rank]
        self.relay_of_source = nodes.relays[:, node]
        self.arrival = np.argsort(self.relay_of_source, kind="stable")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        firsts = placement.offsets[nodes.offsets]  # expert of each node
        held = np.diff(firsts)
        most = int(held.max())
        if most > check.MAX_LOCAL_EXPERTS:
            raise ValueError(
                f"num_experts: expected at most {check.MAX_LOCAL_EXPERTS} a node by the two-hop"
                f" route, got {most} on node {held.argmax()}"
            )
        # Where nodes hold unequally many experts they get numbers with gaps, as if all held `most`:
        # kernels work out the owner of an expert from its number.
        self._numbers: np.ndarray | None = None
        self._over_nodes = Placement(most * len(held), len(held))
        self._in_node = Placement(int(held[node]), nodes.sizes[node])
        if (held < most).any():
            experts = np.arange(placement.num_experts)
            of_node = np.repeat(np.arange(len(held)), held)
            numbers = experts - firsts[of_node] + most * of_node
            self._numbers = np.append(numbers, routing.NO_EXPERT)  # which -1 stands for

    def draft(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None) -> TwoHopDraft:
        """Plan what this rank sends."""
        return self.draft_of(routing.count(topk_idx, self.placement), topk_idx, topk_weights)

    def draft_of(
        self, of_ranks: np.ndarray, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> TwoHopDraft:
        """Plan what this rank sends, with the counts of the flat route at hand."""
        if self._numbers is not None:
            [numbers] = routing.upload(topk_idx.device, self._numbers)
            topk_idx = numbers[topk_idx.long()]
        plan = routing.plan(topk_idx, topk_weights, self._over_nodes)
        return TwoHopDraft(plan, of_ranks, self)

    def relay(
        self, route: torch.Tensor, num_topk: int, from_relay: np.ndarray
    ) -> tuple[RelayPlan, torch.Tensor]:
        """Plan what this rank hands on; see `routing.relay`."""
        return routing.relay(route, num_topk, self._in_node, from_relay[self.own_ranks])

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream on which asynchronous calls relay."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _copies(streams: Rows, relay: RelayPlan) -> Rows:
    """Copy the rows that came to each of their places."""
    return [_copied(rows, relay.row_tokens) for rows in streams]


def _copied(rows: torch.Tensor, row_tokens: torch.Tensor) -> torch.Tensor:
    out = codec.of(rows.device).rows_like(rows, len(row_tokens))
    if out.numel():
        wide = torch.int64 if rows.shape[1] % 8 == 0 else torch.uint8  # copied in fewer pieces
        torch.index_select(rows.view(wide), 0, row_tokens, out=out.view(wide))
    return out


def _orders(
    recv_splits: np.ndarray, arrival: np.ndarray, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row by source arrived, and where each that arrived is by source: ``[n]`` int64.

    The rows of a source stay together.  Example: sources 0 to 2 with 2, 1 and 1 rows that arrive in
    the order 1, 2, 0 give ``[2, 3, 0, 1]`` both; with a row each ``[2, 0, 1]`` and ``[1, 2, 0]``.
    """
    arrived = recv_splits[arrival]
    firsts = np.cumsum(recv_splits) - recv_splits
    firsts_arrived = np.empty_like(firsts)
    firsts_arrived[arrival] = np.cumsum(arrived) - arrived
    shifts = firsts_arrived - firsts
    tables = routing.upload(device, recv_splits, shifts, arrived, -shifts[arrival])
    num_rows = int(recv_splits.sum())
    rows = torch.arange(num_rows, device=device)
    order, position = (
        rows + by.repeat_interleave(sizes, output_size=num_rows)
        for sizes, by in (tables[:2], tables[2:])
    )
    return order, position
