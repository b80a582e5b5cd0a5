"""Timing exchanges and copies on all ranks, as `fp4comm.bench.calibrate` needs them; collective.

Times are medians of some repeats, as those of ``fp4comm bench`` are.  Peers are ``[num_ranks,
num_ranks]`` bool, by sender and receiver; GB/s = 10^9 B/s, each way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch

from fp4comm.agreement import message_words
from fp4comm.bench.clock import Stopwatch
from fp4comm.bench.operations import current_device
from fp4comm.transport import Lent, Transport

TINY_BYTES = 64  # of a row that measures latency
TARGET_S = 0.4  # that the larger of two exchanges should take: shaped links let bursts pass
PAIR_TARGET_S = 0.05  # the same for pairs, of which there are many
STEP = 4  # between their sizes
FIRST_BYTES, MOST_BYTES = 1 << 18, 1 << 26  # of a rank in one exchange
COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}  # so many that beginning and waiting take no part
REPEATS = 5
TINY_REPEATS = 21


class Meter:
    """Times exchanges and copies on all ranks."""

    def __init__(self, transport: Transport, device: str) -> None:
        """Note whom to measure."""
        self._transport = transport
        self._device = current_device(device)
        self._stopwatch = Stopwatch(transport, device)

    def slowest_us(self, call: Callable[[], object], repeats: int) -> float:
        """Median time of the slowest rank, us."""
        return float(np.median(self._samples_us(call, repeats).max(axis=0)))

    def _samples_us(self, call: Callable[[], object], repeats: int) -> np.ndarray:
        with Lent(self._transport, "calibration", self._transport.timeout_s):
            return self._stopwatch.samples_us(call, repeats)

    def copy_gbs(self) -> float:
        """Copy to new memory on all ranks at once, GB/s of the slowest: read plus write.

        New, since calls return new memory, and a CPU's system takes its time to give it.
        """
        num_bytes = COPY_BYTES[self._device.type]
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self._device)
        return 2 * num_bytes / self.slowest_us(source.clone, REPEATS) / 1e3

    def counts_us(self) -> float:
        """Time of the exchange of counts in us."""
        num_ranks = self._transport.num_ranks
        counts = np.zeros((num_ranks, message_words(num_ranks)), np.int64)
        exchange = functools.partial(self._transport.exchange_counts, counts)
        return self.slowest_us(exchange, TINY_REPEATS)

    def large_us(self, peers: np.ndarray, num_bytes: int, repeats: int = REPEATS) -> float:
        """Time of one exchange in us.

        Rank i sends num_bytes to each j with peers[i, j].
        """
        return self.slowest_us(self._exchange(peers, num_bytes), repeats)

    def tiny_us(self, peers: np.ndarray, streams: int) -> float:
        """Time of such an exchange of `TINY_BYTES` in each stream, in us."""
        exchange = self._exchange(peers, TINY_BYTES, streams)
        return self.slowest_us(exchange, TINY_REPEATS)

    def _exchange(
        self, peers: np.ndarray, num_bytes: int, streams: int = 1
    ) -> Callable[[], object]:
        rank = self._transport.rank
        splits = peers[rank].astype(np.int64), peers[:, rank].astype(np.int64)
        sends, recvs = (
            [
                torch.ones((int(rows.sum()), num_bytes), dtype=torch.uint8, device=self._device)
                for _ in range(streams)
            ]
            for rows in splits
        )
        return lambda: self._transport.exchange(sends, splits[0], recvs, splits[1])

    def slope_gbs(self, peers: np.ndarray) -> float:
        """Slope between two sizes: more bytes of the busiest rank over more time, GB/s."""
        most = int(peers.sum(axis=1).max())
        large = self._large_bytes(peers, most, TARGET_S)
        small_us, large_us = (self.large_us(peers, n) for n in (large // STEP, large))
        more = most * (large - large // STEP)
        return more / max(large_us - small_us, 1e-3) / 1e3

    def _large_bytes(self, peers: np.ndarray, most: int, target_s: float) -> int:
        """Bytes for each of `most` peers at most, by which an exchange takes about target_s."""
        num_bytes = max(FIRST_BYTES // most, STEP)
        while num_bytes * most < MOST_BYTES:
            if self.large_us(peers, num_bytes, repeats=1) > target_s * 1e6 / 2:
                break
            num_bytes *= 2
        return num_bytes

    def one_pair_gbs(self, first: int, second: int) -> float:
        """Bandwidth of one pair in GB/s while all others rest."""
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
            us = [  # of each rank
                np.median(self._samples_us(self._exchange(peers, num_bytes), repeats), axis=1)
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
