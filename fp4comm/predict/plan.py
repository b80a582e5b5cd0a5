"""What `fp4comm plan` predicts: every wire format on every route, and whether FP4 pays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fp4comm import check
from fp4comm.bench.recorded import check_found, read_routing
from fp4comm.bench.rows import speedup
from fp4comm.bench.wires import Wires, wires_of
from fp4comm.bench.workload import Synthetic, skew_value
from fp4comm.formats import WireFormat
from fp4comm.predict import spread, times
from fp4comm.predict.loads import ROUTES
from fp4comm.predict.spread import Spread
from fp4comm.predict.times import Prediction, Shape
from fp4comm.routing import Placement
from fp4comm.topology import Places, Topology, load

FP4 = "mxfp4"
RIVALS = ("bf16", "fp8")
LEAST_GAIN = 1.05  # below it FP4 does not pay: predictions are no better than that
EXPERTS, TOPK = 256, 8  # where neither the options nor the routing say how many
MOST_TOKENS = 1 << 20  # that are looked at for where FP4 begins to pay


@dataclasses.dataclass(frozen=True)
class Settings(Wires):
    """What to predict.

    Args:
        routes: ``"flat"``, ``"two_hop"``.
    """

    routes: tuple[str, ...] = ROUTES


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Predictions for one topology, distribution and shape."""

    topology: Topology
    places: Places
    spread: Spread
    shape: Shape
    num_experts: int
    settings: Settings

    @property
    def routes(self) -> tuple[str, ...]:
        """Routes that differ: on one node there is one."""
        several = self.places.num_nodes > 1
        return self.settings.routes if several else ("flat",)

    def rows(self) -> list[Prediction]:
        """The plain all-to-all, then each dispatch, then each combine that differs."""
        peer = times.plain(self.topology, self.places, self.spread, self.shape)
        rounds = [
            self.round_trip(wire, route, self.shape)
            for wire in self.settings.wires
            for route in self.routes
        ]
        combines = {(back.format, back.route): back for _, back in rounds}
        return [peer, *(there for there, _ in rounds), *combines.values()]

    def round_trip(self, wire: str, route: str, shape: Shape) -> tuple[Prediction, Prediction]:
        """Predict a dispatch and its combine."""
        there, back = WireFormat.of(wire), self.settings.combine_of(wire)
        of_all = self.topology, self.places, self.spread, shape
        return (
            times.dispatch(*of_all, there, route, self.settings.arrive),
            times.combine(*of_all, back, route, there),
        )

    def best_us(self, wire: str, shape: Shape, *, whole_round: bool) -> float:
        """Time of the dispatch, or of the whole round, on the faster route."""
        count = 2 if whole_round else 1
        rounds = (self.round_trip(wire, route, shape)[:count] for route in self.routes)
        return min(sum(row.us for row in rows) for rows in rounds)

    def gain(self, rival: str, tokens: int | None = None, *, whole_round: bool = False) -> float:
        """Times that FP4 is faster than another wire format, each on its faster route."""
        shape = self.shape
        if tokens is not None:
            shape = dataclasses.replace(shape, tokens=tokens)
        ours, theirs = (self.best_us(wire, shape, whole_round=whole_round) for wire in (FP4, rival))
        return speedup(theirs, ours)

    def pays_from(self, rival: str) -> int | None:
        """Tokens of a rank, a power of two, from which on FP4's dispatch is faster; None if never.

        It has to be faster by `LEAST_GAIN` there and at every larger power up to `MOST_TOKENS`.
        """
        tokens = MOST_TOKENS
        if self.gain(rival, tokens) < LEAST_GAIN:
            return None
        while tokens > 1 and self.gain(rival, tokens // 2) >= LEAST_GAIN:
            tokens //= 2
        return tokens


def plan_of(options: dict[str, Any]) -> Plan:
    """Make the plan that the options of the command line ask for.

    Raises:
        ValueError: naming the option, or the file and its key.
    """
    topology = load(options["topology_name"])
    places = topology.places(options["nodes"], options["ranks_per_node"])
    routes = ROUTES if options["route"] == "both" else (options["route"],)
    wires = wires_of(options["wire"])
    settings = Settings(wires, options["combine"], options["arrive"], routes)
    check.positive_int("tokens", options["tokens"])
    found, num_experts, num_topk = _spread_of(options, places)
    alignment = check.positive_int("alignment", options["alignment"])
    shape = Shape(options["tokens"], check.hidden(options["hidden"]), num_topk, alignment)
    return Plan(topology, places, found, shape, num_experts, settings)


def _spread_of(options: dict[str, Any], places: Places) -> tuple[Spread, int, int]:
    """Where tokens go, of how many experts, and to how many."""
    num_experts, num_topk, file = options["experts"], options["topk"], options["routing"]
    if file is None:
        num_experts = EXPERTS if num_experts is None else num_experts
        num_topk = TOPK if num_topk is None else num_topk
        sizes = options["tokens"], options["hidden"], num_experts, num_topk
        workload = Synthetic(places.num_ranks, *sizes, options["skew"], options["seed"])
        return spread.synthetic(workload, places, options["node_limit"]), num_experts, num_topk
    topk_idx, num_experts = read_routing(Path(file), num_experts)
    found = {"topk": topk_idx.shape[1], "skew": "none", "node_limit": "none", "seed": "none"}
    check_found({**options, "skew": skew_value(options["skew"])}, found, "routing")
    check.local_experts("experts", num_experts, places.num_ranks)
    placement = Placement(num_experts, places.num_ranks)
    found_spread = spread.of_experts(topk_idx, placement, places, file.name)
    return found_spread, num_experts, topk_idx.shape[1]
