"""The time model: parts of dispatch and combine in us, as `fp4comm bench` times them.

Each part is that of the slowest rank.  A kernel takes a fixed time, and its bytes over a measured
share of the memory's copy speed.  An exchange takes a fixed time, the latency of its furthest link,
its messages one after the other, and the bytes of its fullest link over that link's bandwidth:
links work side by side.  Two hops come one after the other.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fp4comm.agreement import message_words
from fp4comm.bench.rows import row_bytes
from fp4comm.formats import WireFormat, fp8_row_bytes
from fp4comm.predict import loads
from fp4comm.predict.loads import Load
from fp4comm.predict.spread import Spread
from fp4comm.topology import Places, Topology

BF16 = WireFormat("bf16")
US = 1e-3  # bytes over GB/s = 10^9 B/s, in us


@dataclasses.dataclass(frozen=True)
class Shape:
    """What every rank sends, and the ``expert_alignment`` of what arrives."""

    tokens: int
    hidden: int
    num_topk: int
    alignment: int = 128


@dataclasses.dataclass(frozen=True)
class Hop:
    """One exchange.

    Attributes:
        us: time.
        link: the one that takes longest, or the messages.
        net_bytes: that cross the busiest NIC, the more of both ways.
        local_bytes: that cross the busiest rank's local link, the more of both ways.
    """

    us: float
    link: str
    net_bytes: float
    local_bytes: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Time of one operation.

    Attributes:
        op: ``"plain"``, ``"dispatch"`` or ``"combine"``, as in `fp4comm.bench.rows.Row`.
        format: wire format of the operation.
        dispatch: wire format of the dispatch that a combine belongs to.
        route: ``"flat"`` or ``"two_hop"``.
        parts_us: time of each part.
        hops: the exchanges, in order.
    """

    op: str
    format: str
    dispatch: str
    route: str
    parts_us: dict[str, float]
    hops: tuple[Hop, ...]

    @property
    def us(self) -> float:
        """Time of the whole."""
        return sum(self.parts_us.values())

    @property
    def bottleneck(self) -> str:
        """The part that takes longest; of an exchange, its slowest link."""
        part = max(self.parts_us, key=lambda name: self.parts_us[name])
        slowest = max(self.hops, key=lambda hop: hop.us)
        return slowest.link if part == "exchange" else part

    @property
    def net_bytes(self) -> float:
        """Bytes that cross the busiest NIC, of all hops."""
        return max(hop.net_bytes for hop in self.hops)

    @property
    def local_bytes(self) -> float:
        """Bytes that cross the busiest local link, hops added."""
        return sum(hop.local_bytes for hop in self.hops)


def exchange(
    topology: Topology, places: Places, load: Load, num_bytes: float, streams: int = 1
) -> Hop:
    """Predict one exchange.

    Args:
        topology: the links.
        places: of the ranks.
        load: rows over them.
        num_bytes: of a row, in all streams.
        streams: messages for each peer.
    """
    local_way = np.maximum(load.local_out, load.local_in)
    nic_out, nic_in = _of_nics(load.net_out, places), _of_nics(load.net_in, places)
    nic_way = np.maximum(nic_out, nic_in)
    nic_used = nic_out + nic_in if topology.half_duplex else nic_way
    per_us = num_bytes * US
    links = {
        "network": nic_used.max() * per_us / topology.network.gbs,
        "local": local_way.max() * per_us / topology.local.gbs,
    }
    if topology.carries_network:
        out, back = load.local_out + load.net_out, load.local_in + load.net_in
        whole = np.maximum(out, back).max()
        links["local + network"] = whole * per_us / topology.local.gbs
    if topology.device == "cpu":  # one thread of the host copies rows within the node
        copies = (local_way / topology.local.gbs + 2 * load.own / topology.memory_gbs).max()
        links["host copies"] = copies * per_us
    messages = (
        streams
        * (
            load.local_peers * topology.local.message_us
            + load.net_peers * topology.network.message_us
        ).max()
    )
    far = topology.network if load.net_peers.any() else topology.local
    latency = far.latency_us if places.num_ranks > 1 else 0.0
    link = max(links, key=lambda name: links[name])
    us = topology.calls["exchange"] + latency + messages + links[link]
    if messages + latency > links[link]:
        link = "messages"
    return Hop(us, link, nic_way.max() * num_bytes, local_way.max() * num_bytes)


def _of_nics(rows: np.ndarray, places: Places) -> np.ndarray:
    """Sum rows by NIC; a rank with several spreads its rows over them."""
    return np.bincount(places.nic, rows / places.nics_a_rank)


def dispatch(
    topology: Topology,
    places: Places,
    spread: Spread,
    shape: Shape,
    wire: WireFormat,
    route: str = "flat",
    arrive: str = "fp8",
) -> Prediction:
    """Predict a dispatch.

    Args:
        topology: links and kernels.
        places: of the ranks.
        spread: of the tokens.
        shape: of what each rank sends.
        wire: format.
        route: ``"flat"`` or ``"two_hop"``.
        arrive: ``"fp8"``, ``"bf16"`` or ``"packed"``.
    """
    hops = _hops(topology, places, spread, shape, route)
    num_bytes = row_bytes(wire, shape.hidden, shape.num_topk)
    streams = 2 if wire == BF16 else 3  # payload, scales, route
    parts = _begin(topology, places, shape)
    written = hops[0].num_out.max()
    moved = shape.tokens * 2 * shape.hidden + written * wire.row_bytes(shape.hidden)
    parts["quantize"] = _kernel(topology, "quantize", wire, moved)
    exchanges = tuple(exchange(topology, places, hop, num_bytes, streams) for hop in hops)
    parts["exchange"] = sum(hop.us for hop in exchanges)
    if route == "two_hop":  # the relay puts its rows in order for the second hop
        copied = (hops[0].num_in + hops[1].num_out).max() * num_bytes
        parts["relay"] = topology.calls["arrive"] + copied * US / topology.memory_gbs
    parts["arrive"] = _arrive(topology, places, spread, shape, wire, arrive)
    return Prediction("dispatch", wire.name, wire.name, route, parts, exchanges)


def combine(
    topology: Topology,
    places: Places,
    spread: Spread,
    shape: Shape,
    wire: WireFormat,
    route: str = "flat",
    of_dispatch: WireFormat = BF16,
) -> Prediction:
    """Predict a combine; arguments as `dispatch`, of_dispatch being that one's wire format."""
    hops = [hop.reversed() for hop in reversed(_hops(topology, places, spread, shape, route))]
    streams = 1 if wire == BF16 else 2
    hidden, num_bytes = shape.hidden, wire.row_bytes(shape.hidden)
    # Rows that a rank has expert outputs for: the same on both routes.
    arrived = places.num_ranks * shape.tokens * spread.rank_rows
    slots = places.num_ranks * shape.tokens * spread.slots
    moved = (slots * 2 * hidden + arrived * num_bytes).max()
    parts = {"reduce": _kernel(topology, "weighted_reduce", wire, moved)}
    exchanges = tuple(exchange(topology, places, hop, num_bytes, streams) for hop in hops)
    parts["exchange"] = sum(hop.us for hop in exchanges)
    if route == "two_hop":
        summed = (hops[0].num_in + hops[1].num_out).max() * num_bytes
        parts["relay"] = _kernel(topology, "final_reduce", wire, summed)
    came = hops[-1].num_in.max() * num_bytes
    parts["reduce"] += _kernel(topology, "final_reduce", wire, came + shape.tokens * 2 * hidden)
    return Prediction("combine", wire.name, of_dispatch.name, route, parts, exchanges)


def plain(topology: Topology, places: Places, spread: Spread, shape: Shape) -> Prediction:
    """Predict a plain all-to-all of BF16 rows, one copy per expert, as `fp4comm.bench.plain`."""
    load = loads.flat(shape.tokens, spread.slots, places)
    num_bytes = row_bytes(BF16, shape.hidden)
    parts = _begin(topology, places, shape)
    copied = 2 * load.num_out.max() * num_bytes
    parts["quantize"] = topology.calls["quantize"] + copied * US / topology.memory_gbs
    hop = exchange(topology, places, load, num_bytes)
    parts["exchange"] = hop.us
    return Prediction("plain", BF16.name, BF16.name, "flat", parts, (hop,))


def _hops(
    topology: Topology, places: Places, spread: Spread, shape: Shape, route: str
) -> tuple[Load, ...]:
    if route == "two_hop":
        return loads.two_hop(shape.tokens, spread, places)
    return (loads.flat(shape.tokens, spread.rank_rows, places),)


def _begin(topology: Topology, places: Places, shape: Shape) -> dict[str, float]:
    """Plan and counts."""
    slots = shape.tokens * shape.num_topk
    size = places.sizes[places.node]
    one = np.ones(places.num_ranks)
    others, far = size - one, places.num_ranks - size
    load = Load(one, others, others, far, far, others, far)
    num_bytes = 8 * message_words(places.num_ranks)
    counts = exchange(topology, places, load, num_bytes).us - topology.calls["exchange"]
    return {
        "plan": topology.calls["plan"] + slots * topology.calls["plan_slot"],
        "counts": topology.calls["counts"] + counts,
    }


def _arrive(
    topology: Topology,
    places: Places,
    spread: Spread,
    shape: Shape,
    wire: WireFormat,
    arrive: str,
) -> float:
    everyone = places.num_ranks * shape.tokens
    rows, padded = everyone * spread.rank_rows, spread.padded_rows(everyone, shape.alignment)
    table = rows.max() * shape.num_topk  # slots of all wire rows, also those that go elsewhere
    us = topology.calls["layout"] + table * topology.calls["layout_slot"]
    if arrive == "packed":
        return us
    out = fp8_row_bytes(shape.hidden) if arrive == "fp8" else 2 * shape.hidden
    moved = (rows * wire.row_bytes(shape.hidden) + padded * out).max()
    return us + _kernel(topology, f"arrive_{arrive}", wire, moved)


def _kernel(topology: Topology, name: str, wire: WireFormat, num_bytes: float) -> float:
    calls = {"quantize": "quantize", "arrive_fp8": "arrive", "arrive_bf16": "arrive"}
    gbs = topology.memory_gbs * topology.kernels[name][wire.name]
    return topology.calls[calls.get(name, "reduce")] + num_bytes * US / gbs
