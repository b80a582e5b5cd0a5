"""Rows over links: what each rank sends and gets in each hop of an exchange.

Flat: a token goes once to each rank that has one of its experts.  Two hops: once to each node, to
the rank there whose index is the source's modulo the node's ranks (the relay), which sends it once
to each rank of its node that needs it; on its own node the source is the relay.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fp4comm.predict.spread import Spread
from fp4comm.topology import Places

ROUTES = ("flat", "two_hop")


@dataclasses.dataclass(frozen=True, eq=False)
class Load:
    """Rows that each rank sends and gets in one hop, and to how many peers: ``[num_ranks]`` each.

    Attributes:
        own: rows to itself.
        local_out: to other ranks of its node.
        local_in: from other ranks of its node.
        net_out: to other nodes.
        net_in: from other nodes.
        local_peers: messages with ranks of its node, the more of those sent and got.
        net_peers: the same with ranks of other nodes.
    """

    own: np.ndarray
    local_out: np.ndarray
    local_in: np.ndarray
    net_out: np.ndarray
    net_in: np.ndarray
    local_peers: np.ndarray
    net_peers: np.ndarray

    @property
    def num_out(self) -> np.ndarray:
        """Rows that each rank writes for this hop."""
        return self.own + self.local_out + self.net_out

    @property
    def num_in(self) -> np.ndarray:
        """Rows that each rank gets in this hop."""
        return self.own + self.local_in + self.net_in

    def reversed(self) -> Load:
        """The way back."""
        return dataclasses.replace(
            self,
            local_out=self.local_in,
            local_in=self.local_out,
            net_out=self.net_in,
            net_in=self.net_out,
        )


def flat(tokens: int, mean_rows: np.ndarray, places: Places) -> Load:
    """One hop, straight to the ranks.

    Args:
        tokens: of each rank.
        mean_rows: ``[num_ranks]`` rows of a token for each rank: `Spread.rank_rows`, or
            `Spread.slots` for one copy per expert.
        places: of the ranks.
    """
    rows = tokens * mean_rows
    local_out, net_out = _others(rows, places)
    size = places.sizes[places.node]
    message = _at_least_one(mean_rows, tokens)
    local_messages, net_messages = _others(message, places)
    return Load(
        own=rows,
        local_out=local_out,
        local_in=rows * (size - 1),
        net_out=net_out,
        net_in=rows * (places.num_ranks - size),
        local_peers=np.maximum(local_messages, message * (size - 1)),
        net_peers=np.maximum(net_messages, message * (places.num_ranks - size)),
    )


def two_hop(tokens: int, spread: Spread, places: Places) -> tuple[Load, Load]:
    """Over a relay on each node; the first hop's rows of the own node stay where they are."""
    node_rows = tokens * spread.node_rows
    node_messages = _at_least_one(spread.node_rows, tokens)
    served = sources_of_relays(places)
    nothing = np.zeros(places.num_ranks)
    across = Load(
        own=node_rows[places.node],
        local_out=nothing,
        local_in=nothing,
        net_out=node_rows.sum() - node_rows[places.node],
        net_in=node_rows[places.node] * served,
        local_peers=nothing,
        net_peers=np.maximum(
            node_messages.sum() - node_messages[places.node],
            node_messages[places.node] * served,
        ),
    )
    of_node = np.bincount(places.node, spread.rank_rows, places.num_nodes)[places.node]
    relayed = tokens * (served + 1)  # tokens of a relay, its own among them
    by_node = np.bincount(places.node, relayed, places.num_nodes)[places.node]
    size = places.sizes[places.node]
    others, _ = _others(_at_least_one(spread.rank_rows, by_node / size), places)
    inside = Load(
        own=relayed * spread.rank_rows,
        local_out=relayed * (of_node - spread.rank_rows),
        local_in=spread.rank_rows * (by_node - relayed),
        net_out=nothing,
        net_in=nothing,
        local_peers=others,
        net_peers=nothing,
    )
    return across, inside


def sources_of_relays(places: Places) -> np.ndarray:
    """How many ranks of other nodes each rank relays for, ``[num_ranks]``.

    Example: nodes of 2 and 3 ranks: both of the first relay for 2 and 1 of the other node's three.
    """
    served = np.zeros(places.num_ranks)
    for size in np.unique(places.sizes):
        sources = np.bincount(places.index % size, minlength=size)
        is_there = places.sizes[places.node] == size
        served[is_there] = sources[places.index[is_there]] - 1  # without the relay's own node
    return served


def _others(rows: np.ndarray, places: Places) -> tuple[np.ndarray, np.ndarray]:
    """Sum for each rank what goes to others of its node, and to other nodes."""
    of_node = np.bincount(places.node, rows, places.num_nodes)[places.node]
    return of_node - rows, rows.sum() - of_node


def _at_least_one(mean_rows: np.ndarray, tokens: float | np.ndarray) -> np.ndarray:
    """How often one of so many tokens has a row."""
    return 1 - (1 - np.minimum(mean_rows, 1.0)) ** tokens
