"""Topologies: what links a machine's ranks, read from TOML and checked.

A topology is a preset of `topologies/`, by its name, or a file of the user's, by its path.  A
quantity is written with its unit and its source, ``{ value = "400 Gbit/s", source = "..." }``, and
every key of `SCHEMA` must be there; topologies/README.md explains them one by one.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp4comm.formats import FORMATS
from fp4comm.hops import Links
from fp4comm.quantities import BANDWIDTH, COUNT, COUNTS, MOST_COUNT, SHARE, TIME, Kind

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).resolve().parent / "topologies"  # in a checkout a link
MOST_RANKS = MOST_COUNT  # of all nodes, that predictions are made for
DEVICES = ("cpu", "cuda")
DUPLEX = ("full", "half")
KERNELS = ("quantize", "arrive_fp8", "arrive_bf16", "weighted_reduce", "final_reduce")
CALLS = (
    *("plan", "plan_slot", "counts", "quantize", "exchange", "layout", "layout_slot"),
    *("arrive", "reduce"),
)


class TopologyError(ValueError):
    """A topology that cannot be read or does not fit: names file, key, expected and got."""


SCHEMA = {
    "node.ranks": COUNTS,
    "node.most": COUNT,
    "node.nics": COUNT,
    "memory.bandwidth": BANDWIDTH,
    "memory.reached": SHARE,
    **{
        f"{link}.{key}": kind
        for link in ("local", "network")
        for key, kind in (
            ("bandwidth", BANDWIDTH),
            ("reached", SHARE),
            ("latency", TIME),
            ("message", TIME),
        )
    },
}
CODEC_SCHEMA = {
    **{f"calls.{name}": TIME for name in CALLS},
    **{f"kernels.{name}.{wire}": SHARE for name in KERNELS for wire in FORMATS},
}
QUANTITY = ("value", "source")
WORDS = ("name", "description", "device", "local.name", "network.name")  # plain strings
OPTIONAL = ("codec", "local.carries_network", "network.duplex")


# What was read


@dataclasses.dataclass(frozen=True)
class Link:
    """One kind of link, each way.

    Attributes:
        name: what it is, for the report.
        gbs: bandwidth that an exchange reaches, GB/s = 10^9 B/s: of a rank, or of a NIC.
        latency_us: from the call until a first byte can be there.
        message_us: what each further message of a rank adds.
    """

    name: str
    gbs: float
    latency_us: float
    message_us: float


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine's ranks and links; times in us, bandwidths in GB/s = 10^9 B/s.

    Attributes:
        name: of the preset or file.
        description: one line, for the report.
        device: ``"cpu"`` or ``"cuda"``, where the rows are.
        ranks: ranks of each node; one number is that of every node.
        most_nodes: that the file describes.
        nics: of a node, shared evenly by its ranks.
        memory_gbs: of a rank's copy, bytes read plus bytes written.
        local: between ranks of a node, of one rank.
        network: between nodes, of one NIC.
        half_duplex: both ways of a NIC share its bandwidth.
        carries_network: a rank's local link is also its way to the NIC, as PCIe is.
        calls: times that do not depend on bytes; ``*_slot`` are for each top-k slot of a token.
        kernels: by operation and wire format, the share of ``memory_gbs`` that a kernel reaches
            with the bytes that it reads and writes.
        sources: of every number, by key.
    """

    name: str
    description: str
    device: str
    ranks: tuple[int, ...]
    most_nodes: int
    nics: int
    memory_gbs: float
    local: Link
    network: Link
    half_duplex: bool
    carries_network: bool
    calls: Mapping[str, float]
    kernels: Mapping[str, Mapping[str, float]]
    sources: Mapping[str, str]

    @property
    def links(self) -> Links:
        """What ``route="auto"`` of `AllToAll` compares routes with."""
        between = self.network.gbs * self.nics / max(self.ranks)
        return Links(self.local.gbs, between, self.calls["exchange"] + self.local.latency_us)

    def places(self, num_nodes: int | None = None, ranks_per_node: int | None = None) -> Places:
        """Put ranks on nodes: the first node's first.

        Args:
            num_nodes: None takes all that a list of ranks names, else one.
            ranks_per_node: None takes the file's; fewer ranks have their share of the NICs.

        Raises:
            TopologyError: more nodes or ranks than the file describes.
        """
        listed = len(self.ranks) if len(self.ranks) > 1 else None
        nodes = (listed or 1) if num_nodes is None else num_nodes
        most = self.most_nodes if listed is None else min(listed, self.most_nodes)
        if not 0 < nodes <= most:
            raise self._misfit("nodes", f"1..{most}", nodes)
        sizes = np.array(self.ranks * nodes if listed is None else self.ranks[:nodes])
        nics = self.nics
        if ranks_per_node is not None:
            if not 0 < ranks_per_node <= sizes.min():
                expected = f"1..{sizes.min()} ranks of a node"
                raise self._misfit("ranks-per-node", expected, ranks_per_node)
            nics = -(-nics * ranks_per_node // int(sizes.min()))  # their share
            sizes = np.full(nodes, ranks_per_node)
        if sizes.sum() > MOST_RANKS:
            raise self._misfit("ranks", f"at most {MOST_RANKS}", sizes.sum())
        return Places(sizes, nics)

    def _misfit(self, key: str, expected: str, got: Any) -> TopologyError:
        return TopologyError(f"{key}: expected {expected} (topology {self.name}), got {got}")


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """Where ranks are: ``sizes[n]`` of them on node n, in order.

    Attributes:
        sizes: ``[num_nodes]`` ranks of each node.
        nics: of a node.
        node: ``[num_ranks]`` node of each rank.
        index: ``[num_ranks]`` each rank's place on its node.
        nic: ``[num_ranks]`` each rank's NIC, numbered over all nodes; none that no rank uses.
        nics_a_rank: NICs that a rank has to itself, where there are more than ranks; else 1.
    """

    sizes: np.ndarray
    nics: int
    node: np.ndarray = dataclasses.field(init=False)
    index: np.ndarray = dataclasses.field(init=False)
    nic: np.ndarray = dataclasses.field(init=False)
    nics_a_rank: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Number ranks and NICs."""
        sizes = self.sizes
        node = np.repeat(np.arange(len(sizes)), sizes)
        index = np.arange(len(node)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        used = np.minimum(self.nics, sizes)
        first = np.cumsum(used) - used
        object.__setattr__(self, "node", node)
        object.__setattr__(self, "index", index)
        object.__setattr__(self, "nic", first[node] + index * used[node] // sizes[node])
        object.__setattr__(self, "nics_a_rank", np.maximum(self.nics / sizes[node], 1.0))

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return len(self.sizes)

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return len(self.node)


# Reading


def presets() -> list[str]:
    """Names that `load` takes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str | Path) -> Topology:
    """Read a preset by its name, or a file by its path.

    Raises:
        TopologyError: no such preset or file, or a key that is missing, unknown or wrong.

    Example:
        >>> load("hgx-h100-400g").network.name
        'ConnectX-7'
    """
    path = Path(name)
    if path.suffix != ".toml" and path.name == str(name):
        if str(name) not in presets():
            known = ", ".join(presets())
            raise TopologyError(
                f"topology: expected a TOML file or one of {known}, got {str(name)!r}"
            )
        path = FOLDER / f"{name}.toml"
    content = _read(path)
    codec = content.get("codec")
    with_codec = SCHEMA if isinstance(codec, str) else {**SCHEMA, **CODEC_SCHEMA}
    file = _File(path, content)
    numbers = file.numbers(with_codec, (*WORDS, *OPTIONAL))
    if isinstance(codec, str):
        try:
            other = _File(path.parent / codec, _read(path.parent / codec))
        except TopologyError as error:
            raise TopologyError(f"{path}: codec: {error}") from error
        numbers = {**numbers, **other.numbers(CODEC_SCHEMA, ())}
    return _topology(file, numbers)


def _read(path: Path) -> dict[str, Any]:
    name = str(path) if str(path).isprintable() else repr(str(path))
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: no name that a file can have
        reason = getattr(error, "strerror", None) or error
        raise TopologyError(f"{name}: expected a topology, got none ({reason})") from error
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # also numbers of too many digits
        raise TopologyError(f"{name}: expected TOML, got a mistake: {error}") from error


@dataclasses.dataclass(frozen=True)
class _File:
    """The tables of a file, by dotted keys."""

    path: Path
    content: dict[str, Any]

    def get(self, key: str) -> Any:
        """Look up a dotted key; None if it is not there."""
        value: Any = self.content
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def error(self, key: str, expected: str, got: Any) -> TopologyError:
        """Say what is wrong with a key."""
        text = "nothing" if got is None else repr(got)
        return TopologyError(f"{self.path}: {key}: expected {expected}, got {text}")

    def numbers(self, schema: Mapping[str, Kind], others: tuple[str, ...]) -> dict[str, Any]:
        """Check all keys; return each number with its source."""
        known = dict.fromkeys((*schema, *others), "")
        for key in _keys(self.content, known):
            if key not in known:
                close = difflib.get_close_matches(key, known, 1, 0.0)[0]
                raise self.error(key, f"a known key, such as {close}", key)
        return {key: self._number(key, kind) for key, kind in schema.items()}

    def _number(self, key: str, kind: Kind) -> tuple[Any, str]:
        entry = self.get(key)
        if not isinstance(entry, dict):
            expected = f'{{ value = ..., source = "..." }} with {kind.expected}'
            raise self.error(key, expected, entry)
        for part in entry:
            if part not in QUANTITY:
                raise self.error(f"{key}.{part}", f"one of {', '.join(QUANTITY)}", part)
        number = kind.parse(entry.get("value"))
        if number is None:
            raise self.error(f"{key}.value", kind.expected, entry.get("value"))
        source = entry.get("source")
        if not isinstance(source, str) or not source.strip():
            raise self.error(f"{key}.source", "where the number comes from", source)
        return number, source

    def word(self, key: str, among: tuple[str, ...] | None = None) -> str:
        """Check a string."""
        value = self.get(key)
        if not isinstance(value, str) or (among is not None and value not in among):
            raise self.error(
                key, "a text" if among is None else f"one of {', '.join(among)}", value
            )
        return value


def _keys(table: dict[str, Any], known: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys of a table, down to those that are known or hold no table."""
    found: list[str] = []
    for name, value in table.items():
        key = f"{prefix}{name}"
        is_leaf = key in known or not isinstance(value, dict) or set(value) & set(QUANTITY)
        found += [key] if is_leaf else _keys(value, known, f"{key}.")
    return found


def _topology(file: _File, numbers: dict[str, tuple[Any, str]]) -> Topology:
    value = {key: number for key, (number, _) in numbers.items()}
    carries = file.get("local.carries_network")
    if carries not in (None, True, False):
        raise file.error("local.carries_network", "true or false", carries)
    duplex = "full" if file.get("network.duplex") is None else file.word("network.duplex", DUPLEX)
    local, network = (
        Link(
            file.word(f"{link}.name"),
            value[f"{link}.bandwidth"] * value[f"{link}.reached"],
            value[f"{link}.latency"],
            value[f"{link}.message"],
        )
        for link in ("local", "network")
    )
    return Topology(
        name=file.word("name"),
        description=file.word("description"),
        device=file.word("device", DEVICES),
        ranks=value["node.ranks"],
        most_nodes=value["node.most"],
        nics=value["node.nics"],
        memory_gbs=value["memory.bandwidth"] * value["memory.reached"],
        local=local,
        network=network,
        half_duplex=duplex == "half",
        carries_network=bool(carries),
        calls={name: value[f"calls.{name}"] for name in CALLS},
        kernels={
            name: {wire: value[f"kernels.{name}.{wire}"] for wire in FORMATS} for name in KERNELS
        },
        sources={key: source for key, (_, source) in numbers.items()},
    )
