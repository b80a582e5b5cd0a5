"""Recorded inputs of a benchmark: rows and routing, or routing alone, from files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp4comm import check
from fp4comm.bench.workload import UNIFORM, check_sizes, drawn_weights, normal_rows
from fp4comm.routing import NO_EXPERT

DTYPES = {
    "x": (torch.bfloat16,),
    "topk_idx": (torch.int16, torch.int32, torch.int64),
    "topk_weights": (torch.float32,),
}


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
        self.num_experts = _num_experts(f"data: {self.name}", self._idx, num_experts)
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
    try:
        tensors = _from_safetensors(file, DTYPES)
    except (OSError, ValueError) as error:
        raise ValueError(f"data: expected a safetensors file, got {file} ({error})") from error
    for name, dtypes in DTYPES.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype not in dtypes or tensor.dim() != 2 or not tensor.numel():
            got = "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            expected = " or ".join(str(dtype) for dtype in dtypes)
            raise ValueError(f"data: {file}: expected {name} of {expected} [N, ...], got {got}")
    num_rows = {name: len(tensors[name]) for name in DTYPES}
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


class RecordedRouting:
    """Normal rows with recorded routing: rank r takes its tokens r * T on.

    Behind the last token of the file comes its first again.

    Args:
        file: see `read_routing`.
        num_ranks: that share it.
        tokens: T, of each rank.
        hidden: elements of a token.
        num_experts: None is one more than the largest in the file.
        seed: of rows and weights.

    Raises:
        ValueError: as `read_routing` and `check_sizes`.
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
        check_sizes(num_ranks, tokens, hidden, self.num_experts, seed)
        self._seed, self._tokens = seed, tokens
        self.hidden, self.num_tokens = hidden, [tokens] * num_ranks
        self.name = f"x ~ N(0,1) bf16, routing from {file.name}, seed {seed}"

    def rows(self, rank: int, tokens: np.ndarray) -> torch.Tensor:
        """Rows of the tokens."""
        return normal_rows(self._seed, rank, tokens, self.hidden)

    def routing(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Experts, and weights that sum to 1."""
        tokens = rank * self._tokens + np.arange(self._tokens)
        idx = self._topk_idx[tokens % len(self._topk_idx)]
        return idx, drawn_weights(idx.shape, np.random.default_rng((self._seed, rank)))


def read_routing(file: Path, num_experts: int | None = None) -> tuple[np.ndarray, int]:
    """Read ``topk_idx`` ``[T, K]`` from a .npy file or a safetensors file.

    Args:
        file: with integers, -1 for none.
        num_experts: None is one more than the largest in the file.

    Returns:
        them in int64, and the number of experts.

    Raises:
        ValueError: no such file, not that in it, or an expert that there is not.
    """
    try:
        found = _topk_idx(file)
    except Exception as error:  # a broken file fails with any
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
        raise ValueError(f"routing: {file}: expected values in -1..{most}{of_experts}, got {got}")
    return found.astype(np.int64), _num_experts(f"routing: {file}", found, num_experts)


def _num_experts(source: str, topk_idx: np.ndarray, given: int | None) -> int:
    """How many there are; one more than the largest where nobody says."""
    if given is not None:
        return given
    if topk_idx.max() == NO_EXPERT:
        raise ValueError(f"{source}: expected some expert, or how many there are, got none")
    return int(topk_idx.max()) + 1


def _topk_idx(file: Path) -> Any:
    if file.suffix == ".npy":
        found = np.load(file)
        if not isinstance(found, np.ndarray):  # of a zip's several
            raise ValueError("it is no .npy")
        return found
    tensors = _from_safetensors(file, ("topk_idx",))
    if not tensors:
        raise ValueError("it has none")
    return tensors["topk_idx"].numpy()


def _from_safetensors(file: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read those of the tensors that the file has.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as tensors:
            there = set(tensors.keys())
            return {name: tensors.get_tensor(name) for name in names if name in there}
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def check_found(options: dict[str, Any], found: dict[str, Any], source: str) -> None:
    """Refuse other values than what a file has.

    Args:
        options: of a command.
        found: what some of them must be, unless they are not given.
        source: the option that names the file.

    Raises:
        ValueError: naming the option.
    """
    defaults = {"skew": UNIFORM, "seed": 0}
    for name, value in found.items():
        if options[name] not in (defaults.get(name), value):
            option = name.replace("_", "-")
            raise ValueError(f"{option}: expected {value} with this {source}, got {options[name]}")
