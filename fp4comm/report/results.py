"""Result files of ``fp4comm bench``, ``demo`` and ``plan``: read, checked, and seen alike."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fp4comm import topology
from fp4comm.bench.rows import bandwidth_gbs, has_bf16_base, speedup
from fp4comm.files import read_json
from fp4comm.topology import TopologyError

MEASURED, PREDICTED = ("bench", "demo"), ("plan",)
EXPECTED = "a result of fp4comm bench, demo or plan (--json), or a topology (.toml)"


class ReportError(ValueError):
    """Files that are no results: a line for each, which names it and what was expected."""


# What was read


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation with one wire format on one route, measured or predicted.

    Attributes:
        us: median of a measured row.
        p90_us: None of a predicted one, as all below.
        busbw_gbs, algbw_gbs: as `fp4comm.bench.rows.Row` has them.
        bf16_gbs: bytes that its busiest rank would have sent in bf16 over the time.
        content: the row as the file has it.
    """

    op: str
    format: str
    dispatch: str
    route: str
    us: float
    parts_us: dict[str, float]
    content: dict[str, Any]
    p90_us: float | None = None
    algbw_gbs: float | None = None
    busbw_gbs: float | None = None
    bf16_gbs: float | None = None
    num_checked: int | None = None
    num_wrong: int | None = None

    @property
    def name(self) -> str:
        """What tells the row from others of its result: a predicted combine is that of any."""
        is_of_one = self.op == "combine" and self.p90_us is not None
        of = f" of {self.dispatch}" if is_of_one else ""
        route = "" if self.route == "flat" else f", {self.route}"
        return f"{self.op} {self.format}{of}{route}"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a time depends on besides the machine: a prediction fits if all of it is the same.

    Attributes:
        nodes: None if the file does not say.
        tokens: of each rank; None if they differ.
        skew: None with recorded or node-limited routing.
    """

    ranks: int
    nodes: int | None
    tokens: int | None
    hidden: int
    experts: int
    topk: int
    skew: str | float | None
    arrive: str
    alignment: int


def shown(value: Any) -> str:
    """Write a field of a setup."""
    if value is None:
        return "unknown or mixed"
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclasses.dataclass(frozen=True)
class Result:
    """A file, or one of several results in it.

    Attributes:
        name: of the file, without folder and ending; with a number if another has the same, and
            with what tells it from others of its file.
        content: of the file, as it is.
    """

    name: str
    content: dict[str, Any]
    rows: list[Row]
    setup: Setup

    @property
    def is_measured(self) -> bool:
        """Whether it was measured, not predicted."""
        return self.content["command"] in MEASURED

    @property
    def machine(self) -> str:
        """What it ran on: GPU or processor; a prediction's topology."""
        if not self.is_measured:
            return f"topology {self.content['topology']}"
        found = self.content["machine"]
        gpus = found.get("cuda_devices") if self.device == "cuda" else None
        return ", ".join(dict.fromkeys(gpus)) if gpus else str(found.get("cpu", "unknown"))

    @property
    def device(self) -> str:
        """Where the rows were."""
        return str(self.content["arguments"].get("device", "cpu"))

    @property
    def commit(self) -> str:
        """Of the code that was measured; with a mark if files differed from it."""
        git = self.content.get("git") or {}
        return str(git.get("commit") or "unknown")[:10] + (" + changes" if git.get("dirty") else "")

    def vs_bf16(self, row: Row) -> float | None:
        """Times faster than the same operation of the bf16 dispatch on the same route."""
        wanted = (row.op, "bf16", row.route)
        if not has_bf16_base(row.op):
            return None
        return self._vs(row, lambda r: (r.op, r.dispatch, r.route) == wanted)

    def vs_plain(self, row: Row) -> float | None:
        """Times that a dispatch is faster than the plain all-to-all of BF16 rows."""
        return self._vs(row, lambda r: r.op == "plain") if row.op == "dispatch" else None

    def _vs(self, row: Row, is_base: Callable[[Row], bool]) -> float | None:
        base = next(filter(is_base, self.rows), None)
        return None if base is None else speedup(base.us, row.us)


# Reading

WHOLE, TIME, TEXT = "a whole number", "a time above 0", "a text"
PART, TABLE, LIST = "a time", "a table", "a list that is not empty"
WHOLES, TEXTS, SKEW = "a list of whole numbers", "a list of texts", "a number or balanced"
BENCH_KEYS = {
    **dict.fromkeys(("ranks", "hidden", "experts", "topk", "tokens_checked"), WHOLE),
    **dict.fromkeys(("transport", "workload"), TEXT),
    **dict.fromkeys(("arguments", "machine", "versions"), TABLE),
    "tokens": WHOLES,
    "rows": LIST,
}
PLAN_KEYS = {
    **dict.fromkeys(("ranks", "nodes", "tokens", "hidden", "experts"), WHOLE),
    **dict.fromkeys(("num_topk", "alignment"), WHOLE),
    **dict.fromkeys(("topology", "routing"), TEXT),
    "arguments": TABLE,
    "rows": LIST,
}
OPTIONAL_KEYS = {  # null or missing are fine
    **dict.fromkeys(("nodes", "hosts", "gpus"), WHOLE),
    **dict.fromkeys(("arguments.alignment", "arguments.ranks_per_node"), WHOLE),
    **dict.fromkeys(("arguments.arrive", "arguments.device"), TEXT),
    "arguments.skew": SKEW,
    "machine.cuda_devices": TEXTS,
    "git": TABLE,
}
ROW_KEYS = {**dict.fromkeys(("op", "format", "dispatch"), TEXT), "parts_us": TABLE}
BENCH_ROW_KEYS = {
    **ROW_KEYS,
    **dict.fromkeys(("time.median_us", "time.p90_us"), TIME),
    **dict.fromkeys(("wire_bytes.sent", "wire_bytes.sent_to_others", "bf16_bytes"), WHOLE),
    **dict.fromkeys(("num_checked", "num_wrong"), WHOLE),
}
PLAN_ROW_KEYS = {**ROW_KEYS, "route": TEXT, "us": TIME, "bottleneck": TEXT}


def read(files: Sequence[Path]) -> tuple[list[Result], list[Path]]:
    """Read results, and check topologies to predict them with.

    Raises:
        ReportError: with a line for each file that is none.
    """
    results: list[Result] = []
    topologies: list[Path] = []
    wrong = []
    for file in files:
        try:
            if file.suffix == ".toml":
                topology.load(file)
                topologies.append(file)
            else:
                for result in _results(file.stem, _json(file)):
                    name = _unused(result.name, [other.name for other in results])
                    results.append(dataclasses.replace(result, name=name))
        except TopologyError as error:
            wrong.append(str(error))
        except ReportError as error:
            wrong.append(f"{file}: {error}")
    if not wrong and not results:
        wrong.append(f"{files[0]}: expected a result beside the topology, got none")
    if wrong:
        raise ReportError("\n".join(wrong))
    return results, topologies


def _unused(stem: str, names: Sequence[str]) -> str:
    name, number = stem, 1
    while name in names:
        number += 1
        name = f"{stem} ({number})"
    return name


def _json(file: Path) -> list[Any]:
    try:
        return read_json(file)
    except OSError as error:
        raise ReportError(f"expected {EXPECTED}, got no file ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"expected {EXPECTED}, got no JSON ({error})") from error


def _results(name: str, contents: Sequence[Any]) -> list[Result]:
    """Check each result of a file; several are named by what they differ in."""
    if len(contents) == 1:
        return [_result(name, contents[0])]
    if not contents:
        raise ReportError(f"expected {EXPECTED}, got an empty list")
    results = []
    for number, content in enumerate(contents):
        try:
            results.append(_result(name, content))
        except ReportError as error:
            raise ReportError(f"result {number} of the list: {error}") from error
    setups = [dataclasses.asdict(result.setup) for result in results]
    differing = [key for key in setups[0] if len({setup[key] for setup in setups}) > 1]
    told = [", ".join(f"{key} {shown(setup[key])}" for key in differing) for setup in setups]
    return [
        dataclasses.replace(result, name=f"{name} ({of_case})" if of_case else name)
        for result, of_case in zip(results, told, strict=True)
    ]


def _result(name: str, content: Any) -> Result:
    command = content.get("command") if isinstance(content, dict) else None
    if command not in (*MEASURED, *PREDICTED):
        got = "other JSON" if command is None else f"one of {command}"
        raise ReportError(f"expected {EXPECTED}, got {got}")
    return of_content(name, content)


def of_content(name: str, content: dict[str, Any]) -> Result:
    """Check what a file holds.

    Raises:
        ReportError: a key is missing or holds something else.
    """
    is_measured = content["command"] in MEASURED
    _check(content, BENCH_KEYS if is_measured else PLAN_KEYS)
    _check(content, OPTIONAL_KEYS, optional=True)
    rows = []
    for number, row in enumerate(content["rows"]):
        where = f"rows.{number}."
        _check(row, BENCH_ROW_KEYS if is_measured else PLAN_ROW_KEYS, where)
        _check(row, {"route": TEXT}, where, optional=True)
        _check(row["parts_us"], dict.fromkeys(row["parts_us"], PART), f"{where}parts_us.")
        rows.append(_bench_row(row) if is_measured else _plan_row(row))
    setup = _bench_setup(content) if is_measured else _plan_setup(content)
    return Result(name, content, rows, setup)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf


def _is_skew(value: Any) -> bool:
    try:
        return value == "balanced" or _is_time(float(str(value)))
    except ValueError:
        return False


CHECKS: dict[str, Callable[[Any], bool]] = {
    WHOLE: _is_whole,
    TIME: lambda value: _is_time(value) and value > 0,
    PART: _is_time,
    TEXT: lambda value: isinstance(value, str),
    TABLE: lambda value: isinstance(value, dict),
    LIST: lambda value: isinstance(value, list) and bool(value),
    WHOLES: lambda value: isinstance(value, list) and bool(value) and all(map(_is_whole, value)),
    TEXTS: lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value),
    SKEW: _is_skew,
}


def _check(table: Any, keys: dict[str, str], where: str = "", *, optional: bool = False) -> None:
    for key, expected in keys.items():
        value = table
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not (optional and value is None) and not CHECKS[expected](value):
            got = "nothing" if value is None else json.dumps(value)[:60]
            raise ReportError(f"{where}{key}: expected {expected}, got {got}")


def _bench_row(row: dict[str, Any]) -> Row:
    us = row["time"]["median_us"]
    return Row(
        op=row["op"],
        format=row["format"],
        dispatch=row["dispatch"],
        route=row.get("route") or "flat",
        us=us,
        parts_us=row["parts_us"],
        content=row,
        p90_us=row["time"]["p90_us"],
        algbw_gbs=bandwidth_gbs(row["wire_bytes"]["sent"], us),
        busbw_gbs=bandwidth_gbs(row["wire_bytes"]["sent_to_others"], us),
        bf16_gbs=bandwidth_gbs(row["bf16_bytes"], us),
        num_checked=row["num_checked"],
        num_wrong=row["num_wrong"],
    )


def _plan_row(row: dict[str, Any]) -> Row:
    names = ("op", "format", "dispatch", "route", "us", "parts_us")
    return Row(**{name: row[name] for name in names}, content=row)


def _bench_setup(content: dict[str, Any]) -> Setup:
    arguments, tokens = content["arguments"], set(content["tokens"])
    of_node = arguments.get("ranks_per_node")  # what the two-hop route was told
    nodes = -(-content["ranks"] // of_node) if of_node else content.get("nodes")
    is_recorded = arguments.get("data") or arguments.get("routing")
    return Setup(
        ranks=content["ranks"],
        nodes=content.get("hosts") if nodes is None else nodes,
        tokens=content["tokens"][0] if len(tokens) == 1 else None,
        hidden=content["hidden"],
        experts=content["experts"],
        topk=content["topk"],
        skew=None if is_recorded or "skew" not in arguments else _skew(arguments),
        arrive=arguments.get("arrive") or "fp8",  # demo has no such option
        alignment=arguments.get("alignment") or 128,
    )


def _plan_setup(content: dict[str, Any]) -> Setup:
    arguments = content["arguments"]
    is_special = arguments.get("routing") is not None or arguments.get("node_limit") is not None
    return Setup(
        ranks=content["ranks"],
        nodes=content["nodes"],
        tokens=content["tokens"],
        hidden=content["hidden"],
        experts=content["experts"],
        topk=content["num_topk"],
        skew=None if is_special else _skew(arguments),
        arrive=arguments.get("arrive") or "fp8",
        alignment=content["alignment"],
    )


def _skew(arguments: dict[str, Any]) -> str | float:
    """As a number, unless it is `balanced`."""
    skew = str(arguments.get("skew", "0"))
    try:
        return float(skew)
    except ValueError:
        return skew
