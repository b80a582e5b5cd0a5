"""Inputs of a benchmark: rows, routing and weights of every rank, the same on every rank.

Each rank can make the inputs of all ranks, which is how it checks what it received.  Synthetic
inputs depend on the seed, the rank and the token alone; recorded ones are in `recorded.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import torch

from fp4comm import check
from fp4comm.routing import Placement

BALANCED = "balanced"  # a skew that is no number
MOST_SKEW = 10.0  # all but certainly every token then has the same experts
UNIFORM = 0.0  # the skew that is the default


class Workload(Protocol):
    """What all ranks send."""

    @property
    def name(self) -> str:
        """The distribution, for the report."""
        ...

    @property
    def hidden(self) -> int:
        """Elements of a token."""
        ...

    @property
    def num_experts(self) -> int:
        """Experts on all ranks together."""
        ...

    @property
    def num_topk(self) -> int:
        """Experts of a token."""
        ...

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each rank."""
        ...

    def rows(self, rank: int, tokens: np.ndarray) -> torch.Tensor:
        """Rows of the tokens, ``[len(tokens), hidden]`` bfloat16."""
        ...

    def routing(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Experts ``[T, K]`` int64 and weights ``[T, K]`` float32."""
        ...


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Normal rows, and experts drawn by popularity.

    Args:
        tokens: of each rank.
        skew: exponent s of Zipf's law, the n-th most popular expert being drawn in proportion to
            n ** -s, or ``"balanced"``: every rank gets the same number of slots.
        seed: the same seed gives the same inputs.
    """

    num_ranks: int
    tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    skew: float | str = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_sizes(self.num_ranks, self.tokens, self.hidden, self.num_experts, self.seed)
        check.positive_int("topk", self.num_topk)
        if self.num_topk > self.num_experts:
            raise ValueError(
                f"topk: expected at most {self.num_experts} ({self.num_experts} experts, distinct"
                f" within a token), got {self.num_topk}"
            )
        skew_value(self.skew)

    @property
    def name(self) -> str:
        """The distribution."""
        skew = self.skew if self.skew == BALANCED else f"{float(self.skew):.2f}"
        return f"x ~ N(0,1) bf16, skew {skew}, seed {self.seed}"

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each rank."""
        return [self.tokens] * self.num_ranks

    def rows(self, rank: int, tokens: np.ndarray) -> torch.Tensor:
        """Rows of the tokens."""
        return normal_rows(self.seed, rank, tokens, self.hidden)

    def routing(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Experts, distinct within a token, and weights that sum to 1."""
        generator = np.random.default_rng((self.seed, rank))
        if self.skew == BALANCED:
            placement = Placement(self.num_experts, self.num_ranks)
            idx = balanced_experts(self.tokens, self.num_topk, placement, rank)
        else:
            popularity = zipf_popularity(self.num_experts, float(self.skew), self.seed)
            idx = distinct_experts(self.tokens, self.num_topk, popularity, generator)
        return idx, drawn_weights(idx.shape, generator)


def check_sizes(num_ranks: int, tokens: int, hidden: int, num_experts: int, seed: int) -> None:
    """Check the numbers of inputs that are drawn.

    Raises:
        ValueError: naming the option.
    """
    check.hidden(hidden)
    check.positive_int("experts", num_experts)
    check.local_experts("experts", num_experts, num_ranks)
    if not 0 <= tokens <= check.MAX_INT32:
        raise ValueError(f"tokens: expected 0..{check.MAX_INT32}, got {tokens}")
    if seed < 0:
        raise ValueError(f"seed: expected at least 0, got {seed}")


def normal_rows(seed: int, rank: int, tokens: np.ndarray, hidden: int) -> torch.Tensor:
    """Draw rows of the tokens, ``[len(tokens), hidden]`` bfloat16, each by its own generator."""
    values = np.empty((len(tokens), hidden), np.float32)
    for row, token in zip(values, tokens.tolist(), strict=True):
        np.random.default_rng((seed, rank, token)).standard_normal(out=row, dtype="f4")
    return torch.from_numpy(values).to(torch.bfloat16)


def drawn_weights(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Draw weights that sum to 1."""
    weights = generator.random(shape, np.float32) + np.float32(0.1)
    return weights / weights.sum(axis=1, keepdims=True)


def skew_value(skew: float | str) -> float | str:
    """Check a skew, and turn a number's text into the number."""
    if skew == BALANCED:
        return BALANCED
    try:
        number = float(skew)
    except ValueError:
        number = -1.0
    if not 0 <= number <= MOST_SKEW:
        expected = f'a number in 0..{MOST_SKEW:g} or "{BALANCED}"'
        raise ValueError(f"skew: expected {expected}, got {skew!r}")
    return number


def zipf_popularity(num_experts: int, skew: float, seed: int) -> np.ndarray:
    """Popularity of each expert, ``[num_experts]``, sum 1: (n + 1) ** -skew, n in an order drawn.

    The order depends on the seed alone, so that all ranks favour the same experts.
    """
    popularity = (np.arange(num_experts) + 1.0) ** -skew
    order = np.random.default_rng((seed, num_experts)).permutation(num_experts)
    return popularity[order] / popularity.sum()


def distinct_experts(
    num_tokens: int, num_topk: int, popularity: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Draw ``[num_tokens, num_topk]`` experts without replacement within a token.

    The largest of log(popularity) plus Gumbel noise are such a draw.
    """
    keys = np.log(popularity) + generator.gumbel(size=(num_tokens, len(popularity)))
    return np.argsort(-keys, axis=1)[:, :num_topk].astype(np.int64)


def balanced_experts(num_tokens: int, num_topk: int, placement: Placement, rank: int) -> np.ndarray:
    """Deal the slots of this rank's tokens to all ranks in turn, ``[num_tokens, num_topk]``.

    Example: 12 tokens, top-4 of 128 experts on 16 ranks: 3 slots for every rank.
    """
    local = np.arange(placement.num_experts) - placement.offsets[placement.owners]
    in_turn = np.lexsort((placement.owners, local))  # expert 0 of every rank, expert 1 of every ...
    first = rank * num_tokens * num_topk
    slots = first + np.arange(num_tokens * num_topk)
    return in_turn[slots % placement.num_experts].reshape(num_tokens, num_topk).astype(np.int64)
