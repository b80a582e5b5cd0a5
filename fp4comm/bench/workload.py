"""Inputs of a benchmark: rows, routing and weights of every rank, the same on every rank.

Each rank can make the inputs of all ranks, which is how it checks what it received.  Synthetic
inputs depend on the seed, the rank and the token alone; recorded ones come from safetensors files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fp4comm import check
from fp4comm.routing import NO_EXPERT, Placement

BALANCED = "balanced"  # a skew that is no number
MOST_SKEW = 10.0  # all but certainly every token then has the same experts
RECORDED_DTYPES = {
    "x": (torch.bfloat16,),
    "topk_idx": (torch.int16, torch.int32, torch.int64),
    "topk_weights": (torch.float32,),
}


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
        check.hidden(self.hidden)
        check.positive_int("experts", self.num_experts)
        check.local_experts("experts", self.num_experts, self.num_ranks)
        check.positive_int("topk", self.num_topk)
        if not 0 <= self.tokens <= check.MAX_INT32:
            raise ValueError(f"tokens: expected 0..{check.MAX_INT32}, got {self.tokens}")
        if self.seed < 0:
            raise ValueError(f"seed: expected at least 0, got {self.seed}")
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
        """Rows of the tokens, each from a generator of its own."""
        values = np.empty((len(tokens), self.hidden), np.float32)
        for row, token in zip(values, tokens.tolist(), strict=True):
            np.random.default_rng((self.seed, rank, token)).standard_normal(out=row, dtype="f4")
        return torch.from_numpy(values).to(torch.bfloat16)

    def routing(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Experts, distinct within a token, and weights that sum to 1."""
        generator = np.random.default_rng((self.seed, rank))
        if self.skew == BALANCED:
            placement = Placement(self.num_experts, self.num_ranks)
            idx = balanced_experts(self.tokens, self.num_topk, placement, rank)
        else:
            popularity = zipf_popularity(self.num_experts, float(self.skew), self.seed)
            idx = distinct_experts(self.tokens, self.num_topk, popularity, generator)
        return idx, _weights(idx.shape, generator)


def _weights(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Draw weights that sum to 1."""
    weights = generator.random(shape, np.float32) + np.float32(0.1)
    return weights / weights.sum(axis=1, keepdims=True)


class RealRouting:
    """Normal rows with recorded routing, whose tokens the ranks take in turn, round and round.

    Args:
        file: see `read_routing`.
        num_ranks, tokens, hidden, seed: as for `Synthetic`.
        num_experts: likewise.

    Raises:
        ValueError: as `read_routing`.
    """

    def __init__(
        self,
        file: Path,
        num_ranks: int,
        tokens: int,
        hidden: int,
        num_experts: int | None = None,
        seed: int = 0,
    ) -> None:
        """Read the file."""
        self._topk_idx, self.num_experts = read_routing(file, num_experts)
        self.num_topk = self._topk_idx.shape[1]
        sizes = num_ranks, tokens, hidden, self.num_experts, self.num_topk
        self._synthetic = Synthetic(*sizes, seed=seed)
        self.hidden, self.num_tokens = hidden, self._synthetic.num_tokens
        self.name = f"x ~ N(0,1) bf16, routing from {file.name}, seed {seed}"

    def rows(self, rank: int, tokens: np.ndarray) -> torch.Tensor:
        """Rows of the tokens."""
        return self._synthetic.rows(rank, tokens)

    def routing(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Experts, and weights that sum to 1."""
        num_tokens = self._synthetic.tokens
        tokens = rank * num_tokens + np.arange(num_tokens)
        idx = self._topk_idx[tokens % len(self._topk_idx)]
        return idx, _weights(idx.shape, np.random.default_rng((self._synthetic.seed, rank)))


def read_routing(file: Path, num_experts: int | None = None) -> tuple[np.ndarray, int]:
    """Read ``topk_idx`` ``[T, K]`` from a .npy file or a safetensors file.

    Args:
        file: with integers, -1 for none.
        num_experts: None is one more than the largest.

    Returns:
        them in int64, and the number of experts.

    Raises:
        ValueError: no such file, not that in it, or an expert that there is not.
    """
    try:
        found: Any = np.load(file) if file.suffix == ".npy" else _from_safetensors(file)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"routing: expected a .npy or safetensors file with topk_idx, got {file} ({error})"
        ) from error
    if found.ndim != 2 or found.dtype.kind not in "iu" or not found.size:
        raise ValueError(
            f"routing: {file}: expected topk_idx of integers [T, K], got {found.dtype}"
            f" {list(found.shape)}"
        )
    low, high = int(found.min()), int(found.max())
    most = check.MAX_INT32 if num_experts is None else num_experts - 1
    if low < NO_EXPERT or high > most:
        of_experts = "" if num_experts is None else f" ({num_experts} experts)"
        got = low if low < NO_EXPERT else high
        raise ValueError(f"routing: expected values in -1..{most}{of_experts}, got {got}")
    return found.astype(np.int64), high + 1 if num_experts is None else num_experts


def _from_safetensors(file: Path) -> np.ndarray:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np") as tensors:
            return tensors.get_tensor("topk_idx")
    except SafetensorError as error:
        raise ValueError(str(error)) from error


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


class Recorded:
    """Rows and routing from safetensors files, in equal contiguous shares.

    Args:
        files: with ``x`` [N, H] bfloat16, ``topk_idx`` [N, K] integers and ``topk_weights`` [N, K]
            float32; several are taken one after the other.
        num_ranks: R; rank r takes tokens r * N / R on.
        num_experts: None takes it from the files.
        tokens: of each rank; None takes all.

    Raises:
        ValueError: a file cannot be read or does not fit.
    """

    def __init__(
        self,
        files: Sequence[Path],
        num_ranks: int,
        num_experts: int | None = None,
        tokens: int | None = None,
    ) -> None:
        """Read the files."""
        parts = [_read(file) for file in files]
        self._x = _concatenated("x", [part["x"] for part in parts])
        idx = _concatenated("topk_idx", [part["topk_idx"].long() for part in parts])
        self._idx = idx.numpy()
        self._weights = _concatenated("topk_weights", [p["topk_weights"] for p in parts]).numpy()
        self.name = f"x from {', '.join(file.name for file in files)}"
        self.hidden = check.hidden(self._x.shape[1])
        self.num_topk = self._idx.shape[1]
        self.num_experts = int(self._idx.max()) + 1 if num_experts is None else num_experts
        check.local_experts("experts", self.num_experts, num_ranks)
        check.expert_range(check.topk_idx(idx, len(idx), idx.device), self.num_experts)
        self._offsets = _shares(len(idx), num_ranks, tokens)
        self.num_tokens = np.diff(self._offsets).tolist()

    def rows(self, rank: int, tokens: np.ndarray) -> torch.Tensor:
        """Rows of the tokens."""
        return self._x[torch.from_numpy(self._offsets[rank] + tokens)]

    def routing(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Experts and weights."""
        share = slice(self._offsets[rank], self._offsets[rank + 1])
        return self._idx[share], self._weights[share]


def _shares(num_rows: int, num_ranks: int, tokens: int | None) -> np.ndarray:
    """First token of each rank, then the end."""
    if tokens is None:
        return num_rows * np.arange(num_ranks + 1) // num_ranks
    if not 0 <= tokens * num_ranks <= num_rows:
        raise ValueError(
            f"tokens: expected 0..{num_rows // num_ranks} ({num_rows} tokens in the data,"
            f" {num_ranks} ranks), got {tokens}"
        )
    return tokens * np.arange(num_ranks + 1)


def _read(file: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"data: expected a safetensors file, got {file} ({error})") from error
    for name, dtypes in RECORDED_DTYPES.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype not in dtypes or tensor.dim() != 2 or not len(tensor):
            got = "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            expected = " or ".join(str(dtype) for dtype in dtypes)
            raise ValueError(f"data: {file}: expected {name} of {expected} [N, ...], got {got}")
    num_rows = {name: len(tensors[name]) for name in RECORDED_DTYPES}
    if (
        len(set(num_rows.values())) > 1
        or tensors["topk_idx"].shape != tensors["topk_weights"].shape
    ):
        raise ValueError(f"data: {file}: expected as many rows in all tensors, got {num_rows}")
    return tensors


def _concatenated(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    widths = sorted({part.shape[1] for part in parts})
    if len(widths) > 1:
        raise ValueError(f"data: {name}: expected the same width in all files, got {widths}")
    return torch.cat(parts)
