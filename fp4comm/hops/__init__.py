"""Hops: by which ranks wire rows come to where their experts are, and back.

    flat       straight to each rank that has one of the token's experts
    two_hop    once to each node, to a relay there, which hands it on within the node
    auto       whichever of the two the counts and the links say is faster, call by call

`make` gives what plans one of them.  A plan's ``send`` takes the first rows along with the route
and returns a `Way`, which later rows take forth and back; a `Handle` keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp4comm.agreement import ROUTES
from fp4comm.hops.auto import AutoRoute, Crossing, Links, two_hop_is_faster
from fp4comm.hops.flat import FlatRoute
from fp4comm.hops.nodes import Nodes, check_ranks_per_node, find_nodes
from fp4comm.hops.two_hop import TwoHopRoute
from fp4comm.hops.way import Draft, Exchange, Merge, Route, Rows, SettledDraft, Way
from fp4comm.routing import Placement

__all__ = [
    "ROUTES",
    "Crossing",
    "Draft",
    "Exchange",
    "Links",
    "Merge",
    "Nodes",
    "Route",
    "Rows",
    "SettledDraft",
    "Way",
    "check_ranks_per_node",
    "find_nodes",
    "make",
    "two_hop_is_faster",
]


def make(
    route: str,
    placement: Placement,
    node_sizes: Sequence[int],
    rank: int,
    faster: Callable[[Crossing], bool],
) -> Route:
    """Make what plans a route; on one node all of them are the flat one.

    Args:
        route: one of `ROUTES`.
        placement: where the experts are.
        node_sizes: ranks of each node; () for the flat one.
        rank: this one.
        faster: what ``"auto"`` asks about the rows of the busiest ranks.

    Raises:
        ValueError: a node has too many experts for the two-hop route.
    """
    flat = FlatRoute(placement)
    if route == "flat" or len(node_sizes) == 1:
        return flat
    two_hop = TwoHopRoute(placement, Nodes(tuple(node_sizes)), rank)
    return two_hop if route == "two_hop" else AutoRoute(flat, two_hop, faster)
