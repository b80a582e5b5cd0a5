"""Counts first: one small exchange before any row moves; a mistake becomes everybody's error.

Each rank sends each other one: a status word, a fingerprint of the call, how many wire rows will
come and how many go to each expert there.  A rank that found a mistake still takes part, with its
status word set; then all ranks, knowing so, fetch its text and raise it together.  A fingerprint
that differs gives the same error text on all ranks.  Either way the transport stays usable: the
message has the same width in every call, and only counts that do not fit follow in a second one.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fp4comm import texts
from fp4comm.formats import FORMATS, WireFormat
from fp4comm.precision import Precision
from fp4comm.transport import Lent, Transport

Made = TypeVar("Made")

WIRE_VERSION = 1
# Counts that the first message to a rank has room for: with the header 64 words, and more where
# ranks are few and hold many experts each.  Other numbers are another WIRE_VERSION.
LEAST_COUNTS = 43
ALL_COUNTS = 8 * LEAST_COUNTS  # to all ranks together

ERROR_TYPES: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError)
OPERATIONS = ("AllToAll(...)", "dispatch", "a check of arguments", "all_to_all_rows")
MAKE, DISPATCH, COMMAND, ROWS = range(4)
INPUTS = ("", "x", "", "rows")  # what each calls its tokens
DTYPES = ("bfloat16", "float8_e4m3fn with float32 scales")
DEVICES = ("on the CPU", "on a GPU")
WEIGHTS = ("topk_weights given", "no topk_weights")
ROUTES = ("flat", "two_hop", "auto")  # of `hops`
GRADIENTS = ("none", "of {tokens}", "of topk_weights", "of {tokens} and topk_weights")
WIRES = [WireFormat(f.name, rule) for f in FORMATS.values() for rule in f.scale_rules or (None,)]


class Fingerprint(NamedTuple):
    """What has to be the same on all ranks, each as a number."""

    operation: int
    all_to_all: int = 0  # which AllToAll object: a number drawn by rank 0 when it was made
    call: int = 0  # collective calls made on it so far
    history: int = 0  # of the transport's exchanges
    num_experts: int = 0
    hidden: int = 0
    dispatch: int = 0
    combine: int = 0
    dispatch_grad: int = 0
    combine_grad: int = 0
    route: int = 0
    nodes: int = 0  # hash of what else decides on that; 0 by the flat route
    dtype: int = 0
    device: int = 0
    topk: int = 0
    weights: int = 0
    gradient: int = 0
    wire_version: int = WIRE_VERSION
    wire: int = 0  # of all_to_all_rows
    grad_wire: int = 0


HEADER_WORDS = 1 + len(Fingerprint._fields)

# How an error text calls a field, and its values; tokens are those of INPUTS.
FIELD_NAMES = {
    "all_to_all": "AllToAll object in use",
    "call": "number of earlier calls",
    "history": "order of earlier exchanges",
    "dtype": "{tokens}",
    "device": "{tokens}",
    "topk": "topk_idx: top-k",
    "weights": "topk_weights",
    "nodes": "ranks_per_node and links",
    "gradient": "gradients wanted (requires_grad)",
}
FIELD_WORDS = {
    "operation": OPERATIONS,
    "dtype": DTYPES,
    "device": DEVICES,
    "route": ROUTES,
    "weights": WEIGHTS,
    "gradient": GRADIENTS,
    **dict.fromkeys(
        ("dispatch", "combine", "dispatch_grad", "combine_grad", "wire", "grad_wire"), WIRES
    ),
}


def agree(
    transport: Transport, mine: Fingerprint, counts: np.ndarray, failure: Exception | None
) -> np.ndarray:
    """Compare fingerprints and exchange counts.

    Args:
        transport: all of its ranks take part.
        mine: this rank's call.
        counts: ``[num_ranks, k]`` int64, row d for rank d; k the same for the same fingerprint.
        failure: a mistake found on this rank, or None.

    Returns:
        ``[num_ranks, k]`` int64, row s from rank s.

    Raises:
        ValueError, TypeError, RuntimeError: on all ranks alike, naming rank and argument.
    """
    status = 0 if failure is None else 1 + _type_number(failure)
    num_words = message_words(transport.num_ranks)
    room = num_words - HEADER_WORDS
    message = np.zeros((transport.num_ranks, num_words), np.int64)
    message[:, :HEADER_WORDS] = [status, *mine]
    counted = slice(HEADER_WORDS, HEADER_WORDS + min(room, counts.shape[1]))
    message[:, counted] = counts[:, :room]
    received = transport.exchange_counts(message)
    statuses, fingerprints = received[:, 0], received[:, 1:HEADER_WORDS]
    if statuses.any():
        _raise_first_failure(transport, statuses, failure)
    _compare(fingerprints)
    got = received[:, counted]
    if counts.shape[1] <= room:
        return got
    return np.concatenate([got, transport.exchange_counts(counts[:, room:])], axis=1)


def message_words(num_ranks: int) -> int:
    """Int64 words of the first message to each rank, whatever the call.

    >>> [message_words(num_ranks) - HEADER_WORDS for num_ranks in (2, 8, 64)]
    [172, 43, 43]
    """
    return HEADER_WORDS + max(LEAST_COUNTS, ALL_COUNTS // num_ranks)


def make_on_all(transport: Transport, make: Callable[[], Made]) -> Made:
    """Make something on every rank; a mistake on one of them is raised on all.

    Raises:
        ValueError, TypeError, RuntimeError: on all ranks alike; an OSError as a ValueError.
    """
    made: Made | None = None
    failure: Exception | None = None
    try:
        made = make()
    except OSError as error:
        failure = ValueError(str(error))
    except Exception as error:
        failure = error
    nothing = np.empty((transport.num_ranks, 0), np.int64)
    with Lent(transport, "arguments", transport.timeout_s):
        agree(transport, Fingerprint(COMMAND), nothing, failure)
    return made  # type: ignore[return-value]  # else agree has raised


def same_on_all(transport: Transport, values: dict[str, Any]) -> None:
    """Refuse values that are not the same on all ranks, all of them with the same names.

    Raises:
        ValueError: on all ranks alike, naming the first that differs.
    """
    hashes = [zlib.crc32(repr(value).encode()) for value in values.values()]
    with Lent(transport, "arguments", transport.timeout_s):
        told = transport.exchange_counts(np.tile(np.array(hashes), (transport.num_ranks, 1)))
        found = _first_difference(told)
        if found is None:
            return
        rank, column = found
        name, value = list(values.items())[column]
        said = exchange_texts(transport, str(value))
    text = f"{name}: expected {said[0]} as on rank 0, got {said[rank]}"
    raise ValueError(on_rank(rank, transport.num_ranks, text))


def exchange_texts(transport: Transport, text: str) -> list[str]:
    """Exchange a text of each rank, cut to 512 bytes."""
    words = np.tile(texts.pack(text), (transport.num_ranks, 1))
    return [texts.unpack(row) for row in transport.exchange_counts(words)]


@functools.cache
def wire_numbers(precision: Precision) -> dict[str, int]:
    """Number the format of each field."""
    return {
        field.name: WIRES.index(WireFormat.of(getattr(precision, field.name)))
        for field in dataclasses.fields(precision)
    }


def on_rank(rank: int, num_ranks: int, text: str) -> str:
    """Say on which rank."""
    return f"rank {rank} of {num_ranks}: {text}"


def _type_number(failure: Exception) -> int:
    """Number the type that all ranks will raise; what is none of the three becomes RuntimeError."""
    types = (i for i, kind in enumerate(ERROR_TYPES) if isinstance(failure, kind))
    return next(types, ERROR_TYPES.index(RuntimeError))


def _raise_first_failure(
    transport: Transport, statuses: np.ndarray, failure: Exception | None
) -> None:
    said = ""
    if failure is not None:
        is_known = isinstance(failure, ERROR_TYPES)
        said = str(failure) if is_known else f"{type(failure).__name__}: {failure}"
    rank = int(np.flatnonzero(statuses)[0])
    text = on_rank(rank, transport.num_ranks, exchange_texts(transport, said)[rank])
    raise ERROR_TYPES[int(statuses[rank]) - 1](text) from failure


def _first_difference(told: np.ndarray) -> tuple[int, int] | None:
    """Return rank and column of the first that is not as on rank 0, of ``[num_ranks, k]``."""
    differs = told != told[0]
    if not differs.any():
        return None
    column = int(np.flatnonzero(differs.any(axis=0))[0])
    return int(np.flatnonzero(differs[:, column])[0]), column


def _compare(fingerprints: np.ndarray) -> None:
    """Raise the same error on all ranks if any fingerprint differs from rank 0's."""
    found = _first_difference(fingerprints)
    if found is None:
        return
    rank, column = found
    field = Fingerprint._fields[column]
    expected, got = (_word(field, int(fingerprints[r, column])) for r in (0, rank))
    if field in ("all_to_all", "history", "nodes"):  # a number means nothing to a reader
        expected, got = "the one", "another"
    kind = TypeError if field == "dtype" else ValueError
    name = FIELD_NAMES.get(field, field)
    tokens = INPUTS[int(fingerprints[0, Fingerprint._fields.index("operation")])]
    text = f"{name}: expected {expected} as on rank 0, got {got}".format(tokens=tokens)
    raise kind(on_rank(rank, len(fingerprints), text))


def _word(field: str, value: int) -> str:
    words = FIELD_WORDS.get(field)
    if words is None or not 0 <= value < len(words):
        return str(value)
    word = words[value]
    if isinstance(word, WireFormat):
        return word.name if word.scale_rule is None else f"{word.name} ({word.scale_rule})"
    return str(word)
