"""A calibration as the TOML that `fp4comm.topology` reads."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from fp4comm.bench.calibrate import Calibration, LinkTimes
from fp4comm.bench.kernels import HIDDEN, TOKENS, TOPK
from fp4comm.formats import FORMATS
from fp4comm.quantities import entry
from fp4comm.topology import CALLS, KERNELS

NOT_THERE = "not measured: {}; the same as the other link, and never used"
SLOW_PAIR = 0.5  # of the median pair's bandwidth: worth a look


def as_toml(found: Calibration, name: str, description: str, at: str) -> str:
    """Write a topology.

    Args:
        found: what was measured.
        name: of the topology.
        description: of the machine.
        at: when and with what, for the sources: ``"2026-01-31 with mpi (Open MPI 5.0)"``.
    """
    measured = f"measured on {at}"
    same = len(set(found.sizes)) == 1
    lines = [
        "# Written by fp4comm bench --calibrate.",
        entry("name", name),
        entry("description", description),
        entry("device", found.device),
        "",
        "[node]",
        entry("ranks", found.sizes[0] if same else found.sizes, measured),
        entry("most", len(found.sizes), f"{measured}: as many nodes took part"),
        entry("nics", found.nics, f"{measured}: all of a node's ranks over one pair"),
        "",
        "[memory]  # of a rank, all ranks at once",
        entry("bandwidth", f"{_digits(found.copy_gbs)} GB/s", f"{measured}: copy, read plus write"),
        entry("reached", 1.0, "measured as it is"),
    ]
    only = found.local or found.network
    assert only is not None  # there are two ranks
    for table, link, missing in (
        ("local", found.local, "one rank a node"),
        ("network", found.network, "one node"),
    ):
        source = measured if link is not None else NOT_THERE.format(missing)
        lines += ["", f"[{table}]", *_link_lines(table, link or only, source)]
    how = f"{measured}: hidden {HIDDEN}, top-{TOPK}, {_both(TOKENS[found.device])} tokens a rank"
    lines += ["", "[calls]"]
    for call in CALLS:
        us = found.calls_us[call]
        value = f"{_digits(us * 1e3)} ns" if call.endswith("_slot") else f"{_digits(us)} us"
        source = "in the links' latency" if call == "exchange" else how
        lines.append(entry(call, value, source))
    for kernel in KERNELS:
        lines += ["", f"[kernels.{kernel}]"]
        lines += [entry(wire, float(f"{found.shares[kernel][wire]:.3g}"), how) for wire in FORMATS]
    return "\n".join(lines) + "\n"


def _digits(value: float) -> str:
    """Four digits, without an exponent."""
    return np.format_float_positional(value, 4, unique=False, fractional=False, trim="-")


def _both(tokens: tuple[int, int]) -> str:
    return f"{tokens[0]} and {tokens[1]}"


def _link_lines(table: str, link: LinkTimes, source: str) -> list[str]:
    bandwidth = "of a rank, all at once" if table == "local" else "of a NIC, all ranks at once"
    return [
        entry("name", "between ranks of a node" if table == "local" else "between nodes"),
        f"# pairs: latency {_range(link.pair_latency_us, 'us')};"
        f" bandwidth {_range(link.pair_gbs, 'GB/s')}",
        entry("bandwidth", f"{_digits(link.gbs)} GB/s", f"{source}: {bandwidth}"),
        entry("reached", 1.0, "measured as it is"),
        entry("latency", f"{_digits(link.latency_us)} us", f"{source}: 64 bytes, median pair"),
        entry(
            "message", f"{_digits(link.message_us)} us", f"{source}: 64 bytes, 3 streams, all peers"
        ),
    ]


def _range(values: Sequence[float], unit: str) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{low:.4g} to {high:.4g} {unit}, median {middle:.4g}"


def summary_lines(found: Calibration) -> list[str]:
    """Say what was found, and which links are slow."""
    lines = [
        f"# ranks of each node {', '.join(map(str, found.sizes))}; copy {found.copy_gbs:.4g} GB/s"
        " a rank, read plus write"
    ]
    for name, link in (("local", found.local), ("network", found.network)):
        if link is None:
            continue
        of = "a rank" if name == "local" else f"a NIC, {found.nics} a node"
        lines.append(
            f"# {name}: {link.gbs:.4g} GB/s {of}; latency {link.latency_us:.4g} us, a message"
            f" {link.message_us:.4g} us; pairs {_range(link.pair_gbs, 'GB/s')}"
        )
        slow = sum(gbs < SLOW_PAIR * statistics.median(link.pair_gbs) for gbs in link.pair_gbs)
        if slow:
            lines.append(f"# {name}: {slow} pairs with less than half of the median bandwidth")
    return lines
