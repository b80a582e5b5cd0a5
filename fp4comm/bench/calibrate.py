"""Measuring a machine's links and kernels, for `fp4comm plan`; collective.

Rows move by the transport's own `exchange` and kernels run inside dispatch and combine, on all
ranks at once, so that what is measured is what a dispatch meets.  A link's bandwidth is the slope
between two sizes; its latency and the cost of a message come from tiny ones.
Of large exchanges, copies and kernels the fastest of some repeats counts, and of tiny ones the
median: what else runs on the machine is not its own.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator

import numpy as np
import torch

from fp4comm import codec
from fp4comm.agreement import MESSAGE_WORDS
from fp4comm.all_to_all import AllToAll
from fp4comm.bench.check import expert_outputs
from fp4comm.bench.clock import Stopwatch, gather
from fp4comm.bench.operations import current_device
from fp4comm.bench.run import compile_first
from fp4comm.bench.settings import Settings
from fp4comm.bench.workload import Synthetic
from fp4comm.dispatched import Dispatched
from fp4comm.formats import FORMATS, WireFormat, fp8_row_bytes
from fp4comm.hops import find_nodes
from fp4comm.precision import Precision
from fp4comm.quantities import SHARES
from fp4comm.topology import KERNELS
from fp4comm.transport import Transport

TINY_BYTES = 64  # of a row that measures latency
STREAMS = 3  # of a dispatch: payload, scales, route
TARGET_S = 0.4  # that the larger of two exchanges should take: shaped links let bursts pass
PAIR_TARGET_S = 0.05  # the same for pairs, of which there are many
STEP = 4  # between their sizes
FIRST_BYTES, MOST_BYTES = 1 << 18, 1 << 26  # of a rank in one exchange
COPY_BYTES = 1 << 26
REPEATS = 5
TINY_REPEATS = 21
HIDDEN, LOCAL_EXPERTS, TOPK = 2048, 8, 8
TOKENS = {"cpu": (64, 1024), "cuda": (128, 8192)}  # few and many, for the kernels


@dataclasses.dataclass(frozen=True)
class LinkTimes:
    """What was measured of one kind of link.

    Attributes:
        gbs: of a rank, or of all of a node's NICs; GB/s = 10^9 B/s, each way.
        latency_us: of one tiny exchange with one peer, the call included.
        message_us: what each message more adds.
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
    progress: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Measure; every rank returns the same.

    Args:
        transport: all of its ranks take part.
        device: ``"cpu"``, or ``"cuda"``: the device that is current on each rank.
        timeout_s: as `AllToAll` takes it.
        progress: told what comes next, on every rank.

    Raises:
        ValueError: one rank, or ranks of a node that are not consecutive.
    """
    if transport.num_ranks < 2:
        raise ValueError("calibrate: expected at least 2 ranks, got 1")
    sizes = list(find_nodes(transport))
    node = np.repeat(np.arange(len(sizes)), sizes)
    meter = Meter(transport, device)
    progress("measuring the copy of memory")
    copy_gbs = meter.copy_gbs()
    progress("measuring all pairs of ranks")
    pairs = meter.pairs()
    progress("measuring all ranks at once, within nodes and between them")
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
    progress("compiling kernels, which takes a while in the first run after an install")
    for arrive in ("fp8", "bf16"):
        compile_first(transport, Settings(tuple(FORMATS), "same", arrive, device=device))
    kernels = _Kernels(transport, meter, device, timeout_s)
    calls_us, shares = kernels.measure(copy_gbs, progress)
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
        peers: ``[num_ranks, num_ranks]``.
        ranks: that share what is measured.
    """
    own = [measured for pair, measured in pairs.items() if peers[pair]]
    latency_us = statistics.median(us for us, _ in own)
    most = int(peers.sum(axis=1).max())
    tiny_us = meter.exchange_us(peers, TINY_BYTES, STREAMS, TINY_REPEATS)
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


class Meter:
    """Times exchanges and copies on all ranks."""

    def __init__(self, transport: Transport, device: str) -> None:
        """Note whom to measure."""
        self._transport = transport
        self._device = current_device(device)
        self.stopwatch = Stopwatch(transport, device)

    def slowest_us(self, call: Callable[[], object], repeats: int) -> float:
        """Time of the slowest rank, after one call that does not count.

        The median of `TINY_REPEATS`, else the fastest of all repeats.
        """
        samples = [self.stopwatch.time(call)[1] for _ in range(repeats + 1)][1:]
        slowest = gather(self._transport, samples).max(axis=0) / 1e3
        return float(_typical(slowest, repeats))

    def copy_gbs(self) -> float:
        """Copy of memory on all ranks at once: of the slowest, read plus write."""
        source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return 2 * COPY_BYTES / self.slowest_us(lambda: target.copy_(source), REPEATS) / 1e3

    def counts_us(self) -> float:
        """The exchange of counts."""
        counts = np.zeros((self._transport.num_ranks, MESSAGE_WORDS), np.int64)
        return self.slowest_us(lambda: self._transport.exchange_counts(counts), TINY_REPEATS)

    def exchange_us(
        self, peers: np.ndarray, num_bytes: int, streams: int = 1, repeats: int = REPEATS
    ) -> float:
        """One exchange: i sends num_bytes to each j with peers[i, j], in each stream."""
        return self.slowest_us(self._exchange(peers, num_bytes, streams), repeats)

    def _exchange(self, peers: np.ndarray, num_bytes: int, streams: int = 1) -> Callable[[], None]:
        rank = self._transport.rank
        splits = peers[rank].astype(np.int64), peers[:, rank].astype(np.int64)
        sends, recvs = (
            [
                torch.ones((int(rows.sum()), num_bytes), dtype=torch.uint8, device=self._device)
                for _ in range(streams)
            ]
            for rows in splits
        )

        def call() -> None:
            self._transport.phase = "calibration"
            self._transport.exchange(sends, splits[0], recvs, splits[1])

        return call

    def slope_gbs(self, peers: np.ndarray) -> float:
        """Bytes more of the busiest rank over the time that they take more."""
        most = int(peers.sum(axis=1).max())
        large = self._large_bytes(peers, most, TARGET_S)
        small_us, large_us = (self.exchange_us(peers, n) for n in (large // STEP, large))
        more = most * (large - large // STEP)
        return more / max(large_us - small_us, 1e-3) / 1e3

    def _large_bytes(self, peers: np.ndarray, most: int, target_s: float) -> int:
        """Size for each peer by which an exchange takes about target_s."""
        num_bytes = max(FIRST_BYTES // most, STEP)
        while num_bytes * most < MOST_BYTES:
            if self.exchange_us(peers, num_bytes, repeats=1) > target_s * 1e6 / 2:
                break
            num_bytes *= 2
        return num_bytes

    def one_pair_gbs(self, first: int, second: int) -> float:
        """Bandwidth of one pair while all others rest."""
        peers = np.zeros((self._transport.num_ranks,) * 2, bool)
        peers[first, second] = peers[second, first] = True
        return self.slope_gbs(peers)

    def pairs(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Latency in us and bandwidth in GB/s of every pair, all of a round at once."""
        found = {}
        for round_ in rounds(self._transport.num_ranks):
            peers = np.zeros((self._transport.num_ranks,) * 2, bool)
            for pair in round_:
                peers[pair] = peers[pair[::-1]] = True
            large = self._large_bytes(peers, 1, PAIR_TARGET_S)
            us = [
                self._by_rank(peers, num_bytes, repeats)
                for num_bytes, repeats in (
                    (TINY_BYTES, TINY_REPEATS),
                    (large // STEP, REPEATS),
                    (large, REPEATS),
                )
            ]
            for i, j in round_:
                tiny, small, whole = (float(max(t[i], t[j])) for t in us)
                more = large - large // STEP
                found[i, j] = found[j, i] = tiny, more / max(whole - small, 1e-3) / 1e3
        return found

    def _by_rank(self, peers: np.ndarray, num_bytes: int, repeats: int) -> np.ndarray:
        """Time of each rank in us, as `slowest_us` takes it."""
        call = self._exchange(peers, num_bytes)
        samples = [self.stopwatch.time(call)[1] for _ in range(repeats + 1)][1:]
        return _typical(gather(self._transport, samples) / 1e3, repeats)


def _typical(samples_us: np.ndarray, repeats: int) -> np.ndarray:
    """The median along the last axis if there are many samples, else the least."""
    pick = np.median if repeats >= TINY_REPEATS else np.min
    return np.asarray(pick(samples_us, axis=-1))


def rounds(num_ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Pair all ranks with each other, each in one pair a round.

    Example: 4 ranks: 0-3 1-2, then 0-2 3-1, then 0-1 2-3.
    """
    places: list[int | None] = [*range(num_ranks), *([None] * (num_ranks % 2))]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        matched = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(i, j) for i, j in matched if i is not None and j is not None]
        places = [places[0], places[-1], *places[1:-1]]


# Kernels

Sample = tuple[float, float]  # bytes, us


class _Kernels:
    """Times the parts of dispatch and combine that compute, with few and with many tokens."""

    def __init__(self, transport: Transport, meter: Meter, device: str, timeout_s: float) -> None:
        self._transport, self._meter = transport, meter
        self._device, self._timeout_s = current_device(device), timeout_s
        self._sizes = TOKENS[device]
        self._samples: dict[tuple[str, str], list[Sample]] = {}

    def measure(
        self, copy_gbs: float, progress: Callable[[str], None]
    ) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Return the times of calls, and shares of the copy's speed."""
        for wire in FORMATS:
            progress(f"measuring kernels: {wire}")
            for tokens in self._sizes:
                self._once(wire, tokens)
        calls: dict[str, list[float]] = {}
        shares: dict[str, dict[str, float]] = {}
        for (name, wire), samples in self._samples.items():
            call_us, gbs = line(*samples)
            calls.setdefault(name, []).append(call_us)
            if name in KERNELS:
                shares.setdefault(name, {})[wire] = min(max(gbs / copy_gbs, SHARES[0]), SHARES[1])
            else:  # not bytes but slots: us for each
                calls.setdefault(f"{name}_slot", []).append(1 / (gbs * 1e3))
        median = {name: statistics.median(us) for name, us in calls.items()}
        calls_us = {n: median[n] for n in ("plan", "plan_slot", "layout", "layout_slot")}
        calls_us["quantize"] = median["quantize"]
        calls_us["arrive"] = min(median["arrive_fp8"], median["arrive_bf16"])
        calls_us["reduce"] = min(median["weighted_reduce"], median["final_reduce"])
        return calls_us, shares

    def _once(self, wire_name: str, tokens: int) -> None:
        """Time every part with one wire format and number of tokens."""
        wire = WireFormat(wire_name)
        ranks, hidden = self._transport.num_ranks, HIDDEN
        work = Synthetic(ranks, tokens, hidden, LOCAL_EXPERTS * ranks, TOPK)
        idx, weights = map(torch.from_numpy, work.routing(self._transport.rank))
        x = torch.randn(tokens, hidden).bfloat16()
        inputs = tuple(part.to(self._device) for part in (x, idx, weights))
        rows, slots, padded = self._arrivals(work, inputs, wire)
        sent = tokens * 2 * hidden + rows * wire.row_bytes(hidden)
        arrived = rows * wire.row_bytes(hidden)
        packed = self._parts(work, inputs, wire, "packed")
        self._note("plan", wire_name, tokens * TOPK, packed["dispatch plan"])
        self._note("layout", wire_name, rows * TOPK, packed["dispatch arrive"])
        self._note("quantize", wire_name, sent, packed["dispatch quantize"])
        for arrive, row in (("fp8", fp8_row_bytes(hidden)), ("bf16", 2 * hidden)):
            parts = self._parts(work, inputs, wire, arrive)
            us = parts["dispatch arrive"] - packed["dispatch arrive"]
            self._note(f"arrive_{arrive}", wire_name, arrived + padded * row, us)
        self._note("weighted_reduce", wire_name, slots * 2 * hidden + arrived, parts["weighted"])
        us = parts["combine reduce"] - parts["weighted"]
        self._note("final_reduce", wire_name, arrived + tokens * 2 * hidden, us)

    def _note(self, name: str, wire: str, num_bytes: float, us: float) -> None:
        self._samples.setdefault((name, wire), []).append((num_bytes, max(us, 0.1)))

    def _all_to_all(self, work: Synthetic, wire: WireFormat, arrive: str) -> AllToAll:
        return AllToAll(
            self._transport,
            num_experts=work.num_experts,
            hidden=HIDDEN,
            precision=Precision(dispatch=wire, combine=wire),
            arrive=arrive,
            timeout_s=self._timeout_s,
        )

    def _arrivals(
        self, work: Synthetic, inputs: tuple[torch.Tensor, ...], wire: WireFormat
    ) -> tuple[int, int, int]:
        """Wire rows, expert rows, and these with padding, of the rank that gets most."""
        d = self._all_to_all(work, wire, "packed").dispatch(*inputs)
        layout = d.handle.layout
        mine = [layout.recv_splits.sum(), sum(d.num_rows_list), layout.num_expert_rows]
        rows, slots, padded = gather(self._transport, mine).max(axis=0).tolist()
        return rows, slots, padded

    def _parts(
        self,
        work: Synthetic,
        inputs: tuple[torch.Tensor, ...],
        wire: WireFormat,
        arrive: str,
    ) -> dict[str, float]:
        """Least us of the slowest rank in each part; of combine too, with BF16 arrival."""
        a2a = self._all_to_all(work, wire, arrive)
        experts = range(
            self._transport.rank * LOCAL_EXPERTS, (self._transport.rank + 1) * LOCAL_EXPERTS
        )
        samples: dict[str, list[int]] = {}
        for i in range(REPEATS + 1):
            a2a.timings = {}
            d, _ = self._meter.stopwatch.time(lambda: a2a.dispatch(*inputs))
            if arrive == "bf16":
                a2a.timings["weighted"] = self._combine(a2a, d, wire, experts)
            if i:
                for name, seconds in a2a.timings.items():
                    samples.setdefault(name, []).append(round(seconds * 1e9))
        names = sorted(samples)
        ns = gather(self._transport, np.concatenate([samples[name] for name in names]))
        slowest = ns.reshape(self._transport.num_ranks, len(names), -1).max(axis=0)
        return dict(zip(names, (slowest.min(axis=1) / 1e3).tolist(), strict=True))

    def _combine(self, a2a: AllToAll, d: Dispatched, wire: WireFormat, experts: range) -> float:
        """Combine; return the seconds of its first kernel, run once more alone."""
        out = expert_outputs(d, experts)

        def reduce() -> object:
            kernel = codec.of(self._device).weighted_reduce
            return kernel(out, d.handle.layout, wire, weighted=True)

        _, took = self._meter.stopwatch.time(reduce)
        self._meter.stopwatch.time(lambda: a2a.combine(out, d.handle))
        return took / 1e9


def line(few: Sample, many: Sample) -> tuple[float, float]:
    """Lay a line through two samples: us at no bytes, at least 0, and GB/s beyond.

    Example:
        >>> line((1000.0, 3.0), (9000.0, 7.0))
        (2.5, 2.0)
    """
    more_us = many[1] - few[1]
    if more_us <= 0:  # noise, or all of it is the call
        return 0.0, many[0] / many[1] / 1e3
    gbs = (many[0] - few[0]) / more_us / 1e3
    call_us = few[1] - few[0] / gbs / 1e3
    if call_us < 0:  # caches helped with few
        return 0.0, many[0] / many[1] / 1e3
    return call_us, gbs
