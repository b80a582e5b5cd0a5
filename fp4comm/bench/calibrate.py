"""Measuring a machine's links and kernels, for `fp4comm plan`; collective.

Rows move by the transport's own `exchange` and kernels run inside dispatch and combine, on all
ranks at once, so that what is measured is what a dispatch meets.  A link's bandwidth is the slope
between two sizes; its latency and the cost of a message come from tiny ones.
"""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np

from fp4comm import progress
from fp4comm.bench.kernels import Kernels
from fp4comm.bench.meter import Meter
from fp4comm.bench.run import COMPILING, compile_first
from fp4comm.bench.settings import Settings
from fp4comm.formats import FORMATS
from fp4comm.hops import find_nodes
from fp4comm.transport import Transport

STREAMS = 3  # of a dispatch: payload, scales, route


@dataclasses.dataclass(frozen=True)
class LinkTimes:
    """What was measured of one kind of link.

    Attributes:
        gbs: of a rank, or of all of a node's NICs; GB/s = 10^9 B/s, each way.
        latency_us: of one tiny exchange with one peer, the call included.
        message_us: what each further message adds.
        pair_latency_us: of each pair of ranks.
        pair_gbs: of each pair, all pairs of a round at once.
    """

    gbs: float
    latency_us: float
    message_us: float
    pair_latency_us: list[float]
    pair_gbs: list[float]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Everything that was measured.

    Attributes:
        sizes: ranks of each node.
        nics: of a node, as its total over one pair's bandwidth says.
        device: of the rows.
        copy_gbs: of a rank, read plus write, all ranks at once.
        local: links within nodes; None if no node has two ranks.
        network: links between nodes; None if there is one.
        calls_us: as `fp4comm.topology.Topology.calls`.
        shares: by kernel and wire format, of the copy's speed.
    """

    sizes: list[int]
    nics: int
    device: str
    copy_gbs: float
    local: LinkTimes | None
    network: LinkTimes | None
    calls_us: dict[str, float]
    shares: dict[str, dict[str, float]]


def calibrate(
    transport: Transport,
    device: str,
    timeout_s: float = 300.0,
    tell: progress.Tell = progress.NOTHING,
) -> Calibration:
    """Measure; every rank returns the same.

    Args:
        transport: all of its ranks take part.
        device: ``"cpu"``, or ``"cuda"``: the device that is current on each rank.
        timeout_s: as `AllToAll` takes it.
        tell: told what comes next, on every rank.

    Raises:
        ValueError: one rank, or ranks of a node that are not consecutive.
    """
    if transport.num_ranks < 2:
        raise ValueError("calibrate: expected at least 2 ranks, got 1")
    sizes = list(find_nodes(transport))
    node = np.repeat(np.arange(len(sizes)), sizes)
    meter = Meter(transport, device)
    tell("measuring the copy of memory")
    copy_gbs = meter.copy_gbs()
    tell("measuring all pairs of ranks")
    pairs = meter.pairs()
    tell("measuring all ranks at once, within nodes and between them")
    is_local = node[:, None] == node[None, :]
    np.fill_diagonal(is_local, False)
    is_far = node[:, None] != node[None, :]
    local = _link(meter, pairs, is_local, 1.0) if is_local.any() else None
    network = None
    nics = 1
    if is_far.any():
        network = _link(meter, pairs, is_far, float(max(sizes)))
        one = meter.one_pair_gbs(0, sizes[0])
        nics = min(max(round(network.gbs / one), 1), max(sizes))
        network = dataclasses.replace(network, gbs=network.gbs / nics)
    tell(COMPILING)
    for arrive in ("fp8", "bf16"):
        compile_first(transport, Settings(tuple(FORMATS), "same", arrive, device=device))
    calls_us, shares = Kernels(transport, device, timeout_s).measure(copy_gbs, tell)
    counts_us = meter.counts_us() - _counts_model_us(local, network, sizes)
    calls_us |= {"counts": max(counts_us, 0.0), "exchange": 0.0}
    return Calibration(sizes, nics, device, copy_gbs, local, network, calls_us, shares)


def _link(
    meter: Meter, pairs: dict[tuple[int, int], tuple[float, float]], peers: np.ndarray, ranks: float
) -> LinkTimes:
    """Measure one kind of link: peers[i, j] says that i and j are joined by it.

    Args:
        meter: to measure with.
        pairs: latency and bandwidth of each pair.
        peers: ``[num_ranks, num_ranks]`` bool.
        ranks: that share what is measured.
    """
    own = [measured for pair, measured in pairs.items() if peers[pair]]
    latency_us = statistics.median(us for us, _ in own)
    most = int(peers.sum(axis=1).max())
    tiny_us = meter.tiny_us(peers, STREAMS)
    messages = STREAMS * most - 1
    message_us = max(tiny_us - latency_us, 0.0) / messages
    return LinkTimes(
        gbs=meter.slope_gbs(peers) * ranks,
        latency_us=latency_us,
        message_us=message_us,
        pair_latency_us=[us for us, _ in own],
        pair_gbs=[gbs for _, gbs in own],
    )


def _counts_model_us(local: LinkTimes | None, network: LinkTimes | None, sizes: list[int]) -> float:
    """What a prediction says of the counts exchange without its fixed part."""
    size, far = max(sizes), sum(sizes) - min(sizes)
    furthest = network or local
    assert furthest is not None  # there are two ranks
    us = furthest.latency_us
    us += 0.0 if local is None else (size - 1) * local.message_us
    return us + (0.0 if network is None else far * network.message_us)
