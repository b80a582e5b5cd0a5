"""Where tokens go: how often a token has a row for each rank and node, whoever sends it.

Every rank's tokens are taken to come from the same distribution, so that a few numbers for each
rank say all, and 16,384 ranks need no matrix.  A closed form for uniform routing, else a sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from fp4comm.bench.workload import BALANCED, Synthetic, balanced_experts, zipf_popularity
from fp4comm.routing import NO_EXPERT, Placement
from fp4comm.topology import Places

SAMPLE_TOKENS = 1024, 16384  # least and most
SAMPLE_KEYS = 1 << 25  # tokens times experts that are drawn
LEAST_NOISE = np.finfo(np.float32).tiny  # where 0 is drawn
MOST_EXPERTS = 1 << 18  # that are drawn from
CHUNK_KEYS = 1 << 22  # of them at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Spread:
    """Means for one token.

    Attributes:
        name: of the distribution.
        rank_rows: ``[num_ranks]`` wire rows for each rank: how often it has one of the experts.
        node_rows: ``[num_nodes]`` the same for each node.
        slots: ``[num_ranks]`` expert rows on each rank.
        experts: ``[num_ranks]`` experts that each rank holds.
    """

    name: str
    rank_rows: np.ndarray
    node_rows: np.ndarray
    slots: np.ndarray
    experts: np.ndarray

    def padded_rows(self, tokens: int, alignment: int) -> np.ndarray:
        """Expert rows on each rank, ``[num_ranks]``, padding included, of so many tokens in all.

        An expert's segment ends half an alignment before the next one, or is one alignment long if
        it is short, and there is none without rows; a rank's experts are taken as equally popular.
        """
        rows = tokens * self.slots / np.maximum(self.experts, 1)
        half = (alignment - 1) / (2 * alignment)
        segments = np.maximum(rows / alignment + half, 1) * (1 - np.exp(-rows))
        return np.maximum(self.experts * segments * alignment, tokens * self.slots)


def synthetic(workload: Synthetic, places: Places, node_limit: int | None) -> Spread:
    """Spread of the benchmark's workload.

    Args:
        workload: its tokens do not matter here.
        places: of the ranks.
        node_limit: a token's experts are on at most so many nodes, those whose best experts score
            highest, as DeepSeek-V3 routes (arXiv 2412.19437, 2.1.2); None does not limit.

    Raises:
        ValueError: too few experts on so many nodes.
    """
    placement = Placement(workload.num_experts, places.num_ranks)
    if node_limit is not None and node_limit >= places.num_nodes:
        node_limit = None
    is_uniform = node_limit is None and workload.skew != BALANCED and float(workload.skew) == 0
    if is_uniform:
        return uniform(workload.num_topk, placement, places)
    if workload.num_experts > MOST_EXPERTS:
        raise ValueError(
            f"experts: expected at most {MOST_EXPERTS} with a skew or node-limit, by which they are"
            f" drawn, got {workload.num_experts}"
        )
    if workload.skew == BALANCED and node_limit is not None:
        raise ValueError(f"node-limit: expected none with skew {BALANCED}, got {node_limit}")
    if workload.skew == BALANCED:
        tokens = min(SAMPLE_TOKENS[1], max(1, SAMPLE_KEYS // workload.num_experts))
        idx = balanced_experts(tokens, workload.num_topk, placement, 0)
        return of_experts(idx, placement, places, f"balanced ({tokens} tokens)")
    skew = float(workload.skew)
    popularity = zipf_popularity(workload.num_experts, skew, workload.seed)
    least, most = SAMPLE_TOKENS
    tokens = min(max(least, SAMPLE_KEYS // workload.num_experts), most)
    draw = _draw(tokens, workload, popularity, _node_experts(placement, places), node_limit)
    name = f"skew {skew:.2f}, seed {workload.seed}"
    if node_limit is not None:
        name += f", at most {node_limit} nodes a token"
    return of_experts(np.concatenate(list(draw)), placement, places, f"{name} ({tokens} tokens)")


def uniform(num_topk: int, placement: Placement, places: Places) -> Spread:
    """Distinct experts, all equally likely.

    Example: top-8 of 256 experts on 8 ranks: a token has a row for each rank in 0.66 of all cases.
    """
    experts = np.diff(placement.offsets)
    of_node = np.add.reduceat(experts, np.cumsum(places.sizes) - places.sizes)
    num_experts = placement.num_experts
    return Spread(
        "uniform",
        _any_of(experts, num_experts, num_topk),
        _any_of(of_node, num_experts, num_topk),
        experts * (num_topk / num_experts),
        experts,
    )


def _any_of(held: np.ndarray, num_experts: int, num_topk: int) -> np.ndarray:
    """How often at least one of the experts held is among num_topk distinct ones."""
    none = np.ones(len(held))
    for drawn in range(num_topk):
        none *= np.maximum(num_experts - held - drawn, 0) / (num_experts - drawn)
    return 1 - none


def of_experts(topk_idx: np.ndarray, placement: Placement, places: Places, name: str) -> Spread:
    """Spread of tokens whose experts are known.

    Args:
        topk_idx: ``[T, K]`` expert, or -1 for none.
        placement: of the experts.
        places: of the ranks.
        name: of the distribution.
    """
    num_tokens = len(topk_idx)
    is_slot = topk_idx != NO_EXPERT
    tokens = np.broadcast_to(np.arange(num_tokens)[:, None], topk_idx.shape)[is_slot]
    ranks = placement.owners[topk_idx[is_slot]].astype(np.int64)
    return Spread(
        name,
        _pairs(tokens, ranks, places.num_ranks) / num_tokens,
        _pairs(tokens, places.node[ranks], places.num_nodes) / num_tokens,
        np.bincount(ranks, minlength=places.num_ranks) / num_tokens,
        np.diff(placement.offsets),
    )


def _pairs(tokens: np.ndarray, places: np.ndarray, num_places: int) -> np.ndarray:
    """How many different tokens each place has."""
    pairs = np.unique(tokens * num_places + places)
    return np.bincount(pairs % num_places, minlength=num_places)


# Drawing


def _node_experts(placement: Placement, places: Places) -> np.ndarray:
    """First expert of each node, then the end."""
    first_ranks = np.concatenate([[0], np.cumsum(places.sizes)])
    return placement.offsets[first_ranks]


def _draw(
    num_tokens: int,
    workload: Synthetic,
    popularity: np.ndarray,
    node_experts: np.ndarray,
    node_limit: int | None,
) -> Iterator[np.ndarray]:
    """Draw experts of tokens, a chunk at a time: ``[n, K]``.

    An expert's score is exponential noise over its popularity; the K smallest are a draw without
    replacement in proportion to popularity, as `fp4comm.bench.workload.distinct_experts` draws.
    Logarithms of scores are compared: with many experts float32 does not hold the scores.
    """
    generator = np.random.default_rng((workload.seed, workload.num_experts, workload.num_topk))
    rows = max(1, CHUNK_KEYS // workload.num_experts)
    log_popularity = np.log(popularity).astype(np.float32)
    for first in range(0, num_tokens, rows):
        shape = min(rows, num_tokens - first), workload.num_experts
        noise = np.maximum(generator.standard_exponential(shape, np.float32), LEAST_NOISE)
        scores = np.log(noise) - log_popularity
        if node_limit is not None:
            _leave_nodes(scores, node_experts, workload.num_topk, node_limit)
        yield np.argpartition(scores, workload.num_topk - 1, axis=1)[:, : workload.num_topk]


def _leave_nodes(
    scores: np.ndarray, node_experts: np.ndarray, num_topk: int, node_limit: int
) -> None:
    """Put experts of all nodes but the best ones out of reach; scores are logarithms.

    A node's affinity is the sum of those of its best num_topk / node_limit experts, an expert's is
    1 / (1 + score * E), between 0 and 1 as DeepSeek-V3's sigmoid: by its logarithm, the sigmoid of
    -log(score * E).
    """
    num_experts = scores.shape[1]
    held = np.diff(node_experts)
    fewest = int(np.sort(held[held > 0])[:node_limit].sum())
    if fewest < num_topk:
        raise ValueError(
            f"node-limit: expected at least {num_topk} experts on any {node_limit} nodes, got"
            f" {fewest}"
        )
    best = max(1, num_topk // node_limit)
    affinity = np.stack(
        [
            _best_sum(scores[:, first:last], best, num_experts)
            for first, last in zip(node_experts[:-1], node_experts[1:], strict=True)
        ],
        axis=1,
    )
    out = np.argpartition(-affinity, node_limit - 1, axis=1)[:, node_limit:]
    is_out = np.zeros(affinity.shape, bool)
    np.put_along_axis(is_out, out, True, axis=1)
    scores[np.repeat(is_out, held, axis=1)] = np.inf


def _best_sum(scores: np.ndarray, best: int, num_experts: int) -> np.ndarray:
    if scores.shape[1] > best:
        scores = np.partition(scores, best - 1, axis=1)[:, :best]
    return (1 / (1 + np.exp(scores.astype(np.float64)) * num_experts)).sum(axis=1)
