"""How predictions are shown: a table, what it says in words, JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table

from fp4comm.bench.rows import speedup
from fp4comm.predict.plan import FP4, LEAST_GAIN, RIVALS, Plan
from fp4comm.predict.times import Prediction


def header_lines(plan: Plan) -> list[str]:
    """Say what was predicted."""
    topology, places, shape = plan.topology, plan.places, plan.shape
    low, high = places.sizes.min(), places.sizes.max()
    per_node = f"{low}" if low == high else f"{low} to {high}"
    return [
        f"{topology.name}: {topology.description}",
        f"{places.num_ranks} ranks, nodes: {places.num_nodes} of {per_node}, NICs of a node:"
        f" {places.nics}",
        f"local: {topology.local.name}, {topology.local.gbs:.4g} GB/s a rank; network:"
        f" {topology.network.name}, {topology.network.gbs:.4g} GB/s a NIC; each way, as exchanges"
        " reach them",
        f"{shape.tokens} tokens a rank, hidden {shape.hidden}, top-{shape.num_topk}; routing"
        f" {plan.spread.name}: a token goes to {plan.spread.rank_rows.sum():.2f} ranks on"
        f" {plan.spread.node_rows.sum():.2f} nodes; experts get {plan.settings.arrive}",
    ]


def table(rows: Sequence[Prediction]) -> Table:
    """One line for each prediction."""
    shown = Table(box=box.ASCII)
    for name in ("op", "wire", "route"):
        shown.add_column(name, no_wrap=True)
    parts = list(dict.fromkeys(part for row in rows for part in row.parts_us))
    for name in ("total", *parts):
        shown.add_column(name, justify="right", no_wrap=True)
    for name in ("MB a NIC", "MB local", "vs bf16", "vs plain"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("bottleneck", no_wrap=True)
    peers = {(r.op, r.route): r for r in rows if r.format == "bf16" and r.op != "combine"}
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        shown.add_row(
            row.op,
            row.format,
            row.route,
            _time(row.us),
            *(_time(row.parts_us[part]) if part in row.parts_us else "-" for part in parts),
            f"{row.net_bytes / 1e6:.1f}",
            f"{row.local_bytes / 1e6:.1f}",
            _times_faster(row, peers.get(("dispatch", row.route))),
            _times_faster(row, peers.get(("plain", "flat"))),
            row.bottleneck,
            end_section=following is not None and following.op != row.op,
        )
    return shown


def _time(us: float) -> str:
    return f"{us / 1e3:.3f}"


def _times_faster(row: Prediction, peer: Prediction | None) -> str:
    if peer is None or row.op != "dispatch":
        return "-"
    return f"{speedup(peer.us, row.us):.2f}x"


def notes(plan: Plan) -> list[str]:
    """Say how to read the table, which route is faster, and when FP4 does not pay."""
    lines = [
        "Times in ms, of the slowest rank.  MB = 10^6 bytes, of the busiest NIC and of the busiest"
        " rank's local link, the more of both ways.",
        "vs bf16: times faster than its dispatch on the same route; vs plain: than an all-to-all of"
        " BF16 rows, one copy per expert.",
        *_route_lines(plan),
    ]
    if FP4 in plan.settings.wires:
        lines += _verdicts(plan)
    return lines


def _route_lines(plan: Plan) -> Iterator[str]:
    if len(plan.routes) < 2:
        return
    for wire in plan.settings.wires:
        us = {
            route: sum(row.us for row in plan.round_trip(wire, route, plan.shape))
            for route in plan.routes
        }
        fast, slow = sorted(us, key=lambda route: us[route])
        yield (
            f"{wire}: {fast} is the faster route,"
            f" {speedup(us[slow], us[fast]):.2f} times over dispatch and combine."
        )


def _verdicts(plan: Plan) -> Iterator[str]:
    for rival in RIVALS:
        gain = plan.gain(rival)
        whole = plan.gain(rival, whole_round=True)
        pays = "pays" if gain >= LEAST_GAIN else "does NOT pay"
        start = plan.pays_from(rival)
        where = "at no number of tokens" if start is None else f"from {start} tokens a rank on"
        yield (
            f"{FP4} {pays} against {rival}: dispatch {gain:.2f}x as fast, with combine in"
            f" {plan.settings.combine} {whole:.2f}x; it pays {where}."
        )


def as_json(plan: Plan, arguments: dict[str, Any]) -> dict[str, Any]:
    """Everything about a plan, for a file."""
    rows = plan.rows()
    return {
        "command": "plan",
        "arguments": arguments,
        "topology": plan.topology.name,
        "sources": dict(plan.topology.sources),
        "nodes": plan.places.num_nodes,
        "ranks": plan.places.num_ranks,
        "ranks_of_nodes": sorted(set(plan.places.sizes.tolist())),
        "routing": plan.spread.name,
        "rank_rows_a_token": float(plan.spread.rank_rows.sum()),
        "node_rows_a_token": float(plan.spread.node_rows.sum()),
        **dataclasses.asdict(plan.shape),
        "experts": plan.num_experts,
        "rows": [
            {
                **dataclasses.asdict(row),
                "us": row.us,
                "bottleneck": row.bottleneck,
                "net_bytes": row.net_bytes,
                "local_bytes": row.local_bytes,
            }
            for row in rows
        ],
        "fp4": {
            rival: {
                "dispatch_gain": plan.gain(rival),
                "round_gain": plan.gain(rival, whole_round=True),
                "pays": bool(plan.gain(rival) >= LEAST_GAIN),
                "pays_from_tokens": plan.pays_from(rival),
            }
            for rival in RIVALS
        },
    }
