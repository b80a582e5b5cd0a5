"""Quantities of a topology: values with units, as they are read from TOML and written to it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

BANDWIDTH_UNITS = {  # in GB/s = 10^9 B/s
    "Mbit/s": 1e-3 / 8,
    "Gbit/s": 1 / 8,
    "Tbit/s": 1e3 / 8,
    "MB/s": 1e-3,
    "GB/s": 1.0,
    "TB/s": 1e3,
}
TIME_UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}  # in us
MOST_COUNT = 16384  # ranks, nodes or NICs
# Beyond these a number is a slip, and sums and quotients of floats would soon overflow.
BANDWIDTHS_GBS = 1e-9, 1e15
MOST_TIME_US = 1e9
SHARES = 1e-6, 2.0  # a kernel may reach more than a copy does, where caches help


def _with_unit(value: Any, units: Mapping[str, float]) -> float | None:
    found = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?) ?([A-Za-z/]+)", str(value))
    if found is None or found[2] not in units:
        return None
    try:
        return float(found[1]) * units[found[2]]
    except ValueError:
        return None


def _bandwidth(value: Any) -> float | None:
    gbs = _with_unit(value, BANDWIDTH_UNITS)
    least, most = BANDWIDTHS_GBS
    return gbs if gbs is not None and least <= gbs <= most else None


def _time(value: Any) -> float | None:
    us = _with_unit(value, TIME_UNITS)
    return us if us is not None and us <= MOST_TIME_US else None


def _share(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and SHARES[0] <= value <= SHARES[1] else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 < value <= MOST_COUNT else None


def _counts(value: Any) -> tuple[int, ...] | None:
    values = value if isinstance(value, list) else [value]
    return tuple(values) if values and all(_count(v) for v in values) else None


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a quantity is.

    Attributes:
        expected: for error texts.
        parse: takes the value of a file and returns it in the unit of this program, or None.
    """

    expected: str
    parse: Callable[[Any], Any]


BANDWIDTH = Kind(
    f'a bandwidth in {", ".join(BANDWIDTH_UNITS)}, as "400 Gbit/s", of'
    " {:g} to {:g} GB/s".format(*BANDWIDTHS_GBS),
    _bandwidth,
)
TIME = Kind(
    f'a time in {", ".join(TIME_UNITS)}, as "5 us", of at most {MOST_TIME_US / 1e6:g} s', _time
)
SHARE = Kind("a number in {:g}..{:g}".format(*SHARES), _share)
COUNT = Kind(f"a whole number in 1..{MOST_COUNT}", _count)
COUNTS = Kind(f"{COUNT.expected}, or a list of one for each node", _counts)


def entry(key: str, value: Any, source: str | None = None) -> str:
    """Write a key: a plain value, or a quantity with its source.

    Example:
        >>> entry("latency", "5 us", "measured")
        'latency = { value = "5 us", source = "measured" }'
    """
    # JSON's strings, numbers and lists are TOML's, but for characters behind U+FFFF as ASCII.
    text = json.dumps(value, ensure_ascii=False)
    if source is None:
        return f"{key} = {text}"
    return f"{key} = {{ value = {text}, source = {json.dumps(source, ensure_ascii=False)} }}"
