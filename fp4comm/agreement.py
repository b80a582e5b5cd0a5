"""Counts first: one small exchange before any row moves; a mistake becomes everybody's error.

Each rank sends each other one: a status word, a fingerprint of the call, how many wire rows will
come and how many go to each expert there.  A rank that found a mistake still takes part, with its
status word set; then all ranks, knowing so, fetch its text and raise it together.  A fingerprint
that differs gives the same error text on all ranks.  Either way the transport stays usable.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fp4comm.formats import FORMATS, WireFormat
from fp4comm.precision import Precision
from fp4comm.routing import RoutePlan
from fp4comm.transport import Transport

WIRE_VERSION = 1
ERRORS: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError)
TEXT_WORDS = 64  # of an error text: 512 bytes

OPERATIONS = ("AllToAll(...)", "dispatch")
DTYPES = ("bfloat16", "float8_e4m3fn with float32 scales")
ROUTES = ("topk_weights given", "no topk_weights")
WIRES = [WireFormat(f.name, rule) for f in FORMATS.values() for rule in f.scale_rules or (None,)]


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What has to be the same on all ranks, each as a number."""

    operation: int
    all_to_all: int = 0  # which AllToAll object: a number drawn by rank 0
    call: int = 0  # collective calls made on it so far
    num_experts: int = 0
    hidden: int = 0
    dispatch: int = 0
    combine: int = 0
    dispatch_grad: int = 0
    combine_grad: int = 0
    dtype: int = 0
    topk: int = 0
    route: int = 0
    wire_version: int = WIRE_VERSION


FIELDS = tuple(field.name for field in dataclasses.fields(Fingerprint))
WORDS = {
    "operation": OPERATIONS,
    "dtype": DTYPES,
    "route": ROUTES,
    **dict.fromkeys(("dispatch", "combine", "dispatch_grad", "combine_grad"), WIRES),
}
NAMES = {
    "all_to_all": "AllToAll object in use",
    "call": "number of earlier calls",
    "dtype": "x",
    "topk": "topk_idx: top-k",
    "route": "topk_weights",
}


def agree(
    transport: Transport, mine: Fingerprint, plan: RoutePlan | None, failure: Exception | None
) -> np.ndarray:
    """Exchange the counts.

    Args:
        transport: all of its ranks take part.
        mine: this rank's call.
        plan: what this rank will send; None in AllToAll(...).
        failure: a mistake found on this rank.

    Returns:
        ``[num_ranks, 1 + local experts]`` int64: from each rank, wire rows and rows of each expert;
        in AllToAll(...) ``[num_ranks, 0]``.

    Raises:
        ValueError, TypeError, RuntimeError: on all ranks alike, naming rank and argument.
    """
    counts = np.zeros((transport.num_ranks, 0), np.int64)
    if plan is not None:
        counts = np.concatenate([plan.send_splits[:, None], plan.expert_counts], axis=1)
    status = 0 if failure is None else 1 + _kind_of(failure)
    header = np.array([status, *dataclasses.astuple(mine)], np.int64)
    headers = np.broadcast_to(header, (transport.num_ranks, len(header)))
    received = transport.exchange_counts(np.concatenate([headers, counts], axis=1))
    statuses, fingerprints = received[:, 0], received[:, 1 : len(header)]
    if statuses.any():
        _raise_first_failure(transport, statuses, failure)
    _compare(transport.num_ranks, fingerprints)
    return received[:, len(header) :]


def drawn_by_rank_0(transport: Transport, number: int) -> int:
    """Take the number that rank 0 has drawn."""
    mine = np.full((transport.num_ranks, 1), number, np.int64)
    return int(transport.exchange_counts(mine)[0, 0])


def wire_numbers(precision: Precision) -> dict[str, int]:
    """Number the format of each field."""
    return {
        field.name: WIRES.index(WireFormat.of(getattr(precision, field.name)))
        for field in dataclasses.fields(precision)
    }


def _kind_of(failure: Exception) -> int:
    return next(i for i, kind in enumerate(ERRORS) if isinstance(failure, kind))


def _raise_first_failure(
    transport: Transport, statuses: np.ndarray, failure: Exception | None
) -> None:
    text = np.zeros(8 * TEXT_WORDS, np.uint8)
    mine = str(failure or "").encode()[: len(text)]
    text[: len(mine)] = np.frombuffer(mine, np.uint8)
    words = np.broadcast_to(text.view(np.int64), (transport.num_ranks, TEXT_WORDS))
    texts = transport.exchange_counts(np.ascontiguousarray(words))
    rank = int(np.flatnonzero(statuses)[0])
    said = texts[rank].tobytes().rstrip(b"\0").decode(errors="replace")
    error = ERRORS[int(statuses[rank]) - 1](on_rank(rank, transport.num_ranks, said))
    raise error from failure


def _compare(num_ranks: int, fingerprints: np.ndarray) -> None:
    differs = fingerprints != fingerprints[0]
    if not differs.any():
        return
    column = int(np.flatnonzero(differs.any(axis=0))[0])
    rank = int(np.flatnonzero(differs[:, column])[0])
    field = FIELDS[column]
    expected, got = (_word(field, fingerprints[r, column]) for r in (0, rank))
    kind = TypeError if field == "dtype" else ValueError
    name = NAMES.get(field, field)
    raise kind(on_rank(rank, num_ranks, f"{name}: expected {expected} as on rank 0, got {got}"))


def _word(field: str, value: int) -> str:
    words = WORDS.get(field)
    if words is None or not 0 <= value < len(words):
        return str(value)
    word = words[value]
    if isinstance(word, WireFormat):
        return word.name if word.scale_rule is None else f"{word.name} ({word.scale_rule})"
    return str(word)


def on_rank(rank: int, num_ranks: int, text: str) -> str:
    """Say on which rank."""
    return f"rank {rank} of {num_ranks}: {text}"
