"""Cases of a benchmark: every combination of the sizes that the command line gives."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from fp4comm.bench.recorded import Recorded, RecordedRouting, check_found
from fp4comm.bench.wires import separated
from fp4comm.bench.workload import UNIFORM, Synthetic, Workload, skew_value

SYNTHETIC = {"tokens": 1024, "hidden": 2048, "experts": 64, "topk": 8}  # defaults without --data
SWEPT = ("hidden", "experts", "topk", "skew", "tokens")  # the last one changes fastest


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of inputs.

    Attributes:
        sizes: by option; None where it was not given.
        workload: made of them.
    """

    sizes: dict[str, Any]
    workload: Workload

    def written(self, name: str) -> str:
        """Write one of the sizes: 1 for 1.0."""
        value = self.sizes[name]
        return f"{value:g}" if isinstance(value, float) else str(value)


def cases_of(options: dict[str, Any], num_ranks: int) -> list[Case]:
    """Make the inputs of each combination, so that a mistake in any of them shows now.

    Args:
        options: of ``fp4comm bench``; those in SWEPT hold texts with one or several values.
        num_ranks: for as many ranks.

    Raises:
        ValueError: naming the option.
    """
    values = [_values(name, options[name]) for name in SWEPT]
    sizes = [dict(zip(SWEPT, combined, strict=True)) for combined in itertools.product(*values)]
    return [Case(of_case, _workload({**options, **of_case}, num_ranks)) for of_case in sizes]


def varying(cases: Sequence[Case]) -> list[str]:
    """Name the options in which the cases differ."""
    return [name for name in SWEPT if len({case.sizes[name] for case in cases}) > 1]


def _values(name: str, texts: Sequence[str]) -> Sequence[Any]:
    if name == "skew":
        return separated(texts, skew_value) or (UNIFORM,)
    return separated(texts, functools.partial(_whole, name)) or (None,)


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}: expected whole numbers, got {text!r}") from None


def _workload(options: dict[str, Any], num_ranks: int) -> Workload:
    """Make the inputs that the options of one case name."""
    if options["routing"]:
        return _recorded_routing(options, num_ranks)
    if not options["data"]:
        sizes = {n: v if options[n] is None else options[n] for n, v in SYNTHETIC.items()}
        tokens, hidden, num_experts, num_topk = sizes.values()
        skew, seed = options["skew"], options["seed"]
        return Synthetic(num_ranks, tokens, hidden, num_experts, num_topk, skew, seed)
    recorded = Recorded(options["data"], num_ranks, options["experts"], options["tokens"])
    found = {"hidden": recorded.hidden, "topk": recorded.num_topk, "skew": "none", "seed": "none"}
    check_found(options, found, "data")
    return recorded


def _recorded_routing(options: dict[str, Any], num_ranks: int) -> RecordedRouting:
    if options["data"]:
        raise ValueError("routing: expected without data, which has its own, got both")
    tokens, hidden = (
        SYNTHETIC[name] if options[name] is None else options[name] for name in ("tokens", "hidden")
    )
    sizes = num_ranks, tokens, hidden, options["experts"], options["seed"]
    made = RecordedRouting(options["routing"], *sizes)
    check_found(options, {"topk": made.num_topk, "skew": "none"}, "routing")
    return made
