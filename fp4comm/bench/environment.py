"""What a run took place on: machine, hosts, GPUs, libraries and commit."""

from __future__ import annotations

import collections
import dataclasses
import os
import platform
from collections.abc import Iterable
from typing import Any

import torch

from fp4comm import agreement, machine
from fp4comm.hops.nodes import NODE_VARIABLE
from fp4comm.transport import Transport


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: its name; not written to JSON.
        nccl_host: the name that NCCL_HOSTID gives it instead, for ranks of one host that are to
            talk as if they were on several; empty without.
        gpu: what identifies the GPU; empty on a CPU.
    """

    host: str
    nccl_host: str = ""
    gpu: str = ""


@dataclasses.dataclass(frozen=True)
class Environment:
    """What a run took place on.

    Attributes:
        command: name and the options that were given.
        transport: its name, and the library below it.
        places: where each rank runs.
        git: commit of the code, and whether files differ from it; None if unknown.
    """

    command: str
    num_ranks: int
    transport: str
    places: list[Place]
    machine: dict[str, Any]
    versions: dict[str, str | None]
    git: dict[str, Any] | None = None

    @property
    def num_hosts(self) -> int:
        """Different hosts."""
        return len({place.host for place in self.places})

    @property
    def num_nodes(self) -> int:
        """What NCCL takes for different hosts."""
        return len({(place.host, place.nccl_host) for place in self.places})

    @property
    def num_gpus(self) -> int:
        """Different GPUs that ranks work on; 0 on CPUs."""
        return len({(place.host, place.gpu) for place in self.places if place.gpu})

    @property
    def where(self) -> str:
        """Name the hosts, and the virtual nodes and GPUs on them if that says more."""
        parts = [f"hosts {_counted(place.host for place in self.places)}"]
        if self.num_nodes > self.num_hosts:
            parts.append(f"virtual nodes {_counted(p.nccl_host for p in self.places)}")
        if self.num_gpus:
            parts.append(f"{self.num_gpus} GPU{'s' * (self.num_gpus > 1)}")
        return ", ".join(parts)


def of_run(command: str, group: Transport, device: str) -> Environment:
    """Describe this rank's machine, and where all ranks run; collective."""
    gpu = _gpu() if device == "cuda" else ""
    mine = Place(platform.node(), os.environ.get(NODE_VARIABLE, ""), gpu)
    places = zip(
        *(agreement.exchange_texts(group, text) for text in dataclasses.astuple(mine)), strict=True
    )
    return Environment(
        command=command,
        num_ranks=group.num_ranks,
        transport=f"{group.name} ({_library(group.name, device)})",
        places=[Place(*place) for place in places],
        **machine.about(),
    )


def _library(transport_name: str, device: str) -> str | None:
    """Name what moves the rows."""
    if transport_name == "local":
        return "threads of one process"
    if transport_name == "mpi":
        return machine.mpi_library()
    if device == "cpu":
        return "gloo"
    return f"NCCL {machine.nccl_library()}"


def _gpu() -> str:
    """Tell this rank's GPU from others of its machine."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{name} x{n}" for name, n in collections.Counter(names).items())
