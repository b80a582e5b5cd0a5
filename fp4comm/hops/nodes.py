"""Nodes: which ranks are on one machine, and which of them relays for whom."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from fp4comm import agreement, check
from fp4comm.transport import Transport

NODE_VARIABLE = "NCCL_HOSTID"  # what NCCL takes instead of a host's name, and so do we


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Ranks stand on nodes in contiguous ranges.

    Attributes:
        sizes: ranks of each node.

    Example: 3 and 2 ranks; who takes in what each source sends to each node.
        >>> Nodes((3, 2)).relays.tolist()
        [[0, 3], [1, 4], [2, 3], [0, 3], [1, 4]]
    """

    sizes: tuple[int, ...]

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """First rank of each node, then the number of ranks: ``[num_nodes + 1]`` int64."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    @functools.cached_property
    def of_rank(self) -> np.ndarray:
        """Node of each rank, ``[num_ranks]`` int64."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def ranks(self, node: int) -> slice:
        """Ranks of a node."""
        return slice(int(self.offsets[node]), int(self.offsets[node + 1]))

    @functools.cached_property
    def relays(self) -> np.ndarray:
        """Rank that takes in what a source sends to a node: ``[num_ranks, num_nodes]`` int64.

        On its own node the source itself; elsewhere the rank whose place on its node is the
        source's, modulo the ranks there.
        """
        ranks = np.arange(len(self.of_rank))
        places = ranks - self.offsets[self.of_rank]
        relays = self.offsets[:-1] + places[:, None] % np.array(self.sizes)
        relays[ranks, self.of_rank] = ranks
        return relays


def check_ranks_per_node(value: Any, num_ranks: int) -> tuple[int, ...] | None:
    """Check the argument of that name, and turn it into the ranks of each node.

    Raises:
        ValueError, TypeError: it does not fit the number of ranks.
    """
    if value is None:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str):
        sizes = tuple(check.positive_int("ranks_per_node", size) for size in value)
        if sum(sizes) != num_ranks:
            raise ValueError(
                f"ranks_per_node: expected a sum of {num_ranks} ranks, got {list(sizes)}"
            )
        return sizes
    size = check.positive_int("ranks_per_node", value)
    if num_ranks % size:
        raise ValueError(
            f"ranks_per_node: expected a divisor of {num_ranks} ranks, or the ranks of each node,"
            f" got {size}"
        )
    return (size,) * (num_ranks // size)


def find_nodes(transport: Transport) -> tuple[int, ...]:
    """Find the ranks of each node by the names of their hosts.  Collective.

    A host's name is what NCCL_HOSTID says, as NCCL has it, else its own.

    Raises:
        ValueError: ranks of a host are not consecutive; on all ranks alike.
    """
    names = agreement.exchange_texts(
        transport, os.environ.get(NODE_VARIABLE) or socket.gethostname()
    )
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    again = [name for i, (name, _) in enumerate(runs) if name in dict(runs[:i])]
    if again:
        ranks = [rank for rank, name in enumerate(names) if name == again[0]]
        raise ValueError(
            f"route: expected the ranks of a node to be consecutive, got ranks {ranks} of"
            f" {len(names)} on {again[0]} (mpirun places them so with --map-by slot)"
        )
    return tuple(size for _, size in runs)
