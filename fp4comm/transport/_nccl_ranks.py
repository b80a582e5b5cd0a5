"""What NCCL needs on every rank, compared before it connects them: one error for all ranks.

Nothing of NCCL says which rank lacks something, and ranks that have all would wait for it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fp4comm import gpu, texts

MIN_VERSION = 21800  # 2.18 brought ncclCommSplit, without which CuPy's bindings do not load
SHARING_VERSION = 23000  # 2.30 lets ranks share a GPU
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
ID_BYTES = 128


def import_nccl() -> Any:
    """Return ``cupy.cuda.nccl``; raise RuntimeError ``needs ...`` saying what to install."""
    install = gpu.install()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns of what is raised below
            nccl = importlib.import_module("cupy.cuda.nccl")
    except Exception as error:
        raise RuntimeError(f"needs CuPy ({type(error).__name__}: {error}); {install}") from error
    version = nccl.get_version() if nccl.available else _version_of_library()
    if version is not None and version < MIN_VERSION:
        raise RuntimeError(
            f"needs NCCL {gpu.nccl_words(MIN_VERSION)} or newer, found {gpu.nccl_words(version)};"
            f" {install}"
        )
    if not nccl.available:
        raise RuntimeError(f"needs libnccl ({_why_not_loaded()}); {install}")
    return nccl


def _version_of_library() -> int | None:
    """Ask libnccl itself, with which CuPy's bindings may not load."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value


def _why_not_loaded() -> str:
    try:
        importlib.import_module("cupy_backends.cuda.libs.nccl")
    except Exception as error:
        return str(error)
    return "this CuPy does not use it"


def missing() -> str | None:
    """Return ``needs ...``, what this process lacks for rows to travel by NCCL, or None."""
    lacks = gpu.missing()
    if lacks is not None:
        return lacks
    try:
        import_nccl()
    except RuntimeError as error:
        return str(error)
    return None


class RefusedError(RuntimeError):
    """The same on all ranks: the transport is as it was."""


@dataclass(frozen=True)
class Presence:
    """What one rank has."""

    missing: str  # "needs ...", or nothing is missing
    version: int  # of NCCL
    device: str  # which GPU, in words that are the same for the same one
    may_share: bool  # the device with another rank

    @classmethod
    def here(cls) -> Presence:
        """Look at this process and torch's current device."""
        lacks = missing()
        if lacks is not None:
            return cls(lacks, 0, "", False)
        try:
            version, device = import_nccl().get_version(), _device()
        except Exception as error:  # the peers wait for this rank's words
            return cls(f"needs a GPU that works ({type(error).__name__}: {error})", 0, "", False)
        allowed = os.environ.get(SHARING, "0") not in ("", "0")
        return cls("", version, device, allowed and version >= SHARING_VERSION)

    def packed(self) -> np.ndarray:
        """Return it as int64 words, equally many for any."""
        flags = [not self.missing, self.version, self.may_share]
        return np.concatenate([np.array(flags, np.int64), texts.pack(self.missing or self.device)])

    @classmethod
    def unpacked(cls, words: np.ndarray) -> Presence:
        """Make it of `packed` words, the text cut if it was too long."""
        has_all, version, may_share = map(int, words[:3])
        text = texts.unpack(words[3:])
        return cls("" if has_all else text, version, text if has_all else "", bool(may_share))


def _device() -> str:
    """Name torch's current device; two processes on the same one say the same."""
    device = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return f"GPU {uuid}"
    runtime = importlib.import_module("cupy").cuda.runtime
    return f"GPU {runtime.deviceGetPCIBusId(device)} of {socket.gethostname()}"


def check_ranks(transport: Any, mine: Presence) -> None:
    """Compare what all ranks have, this one ``mine``.  Collective over ``transport``.

    Raises:
        RefusedError: on all ranks alike, naming a rank that lacks something, or two that differ in
            NCCL's version, or share a device and may not.
    """
    words = np.tile(mine.packed(), (transport.num_ranks, 1))
    ranks = [Presence.unpacked(row) for row in transport.exchange_counts(words)]
    first_on: dict[str, int] = {}
    for rank, presence in enumerate(ranks):
        if presence.missing:
            _refuse(transport, rank, f'transport "{transport.name}" {presence.missing}')
    for rank, presence in enumerate(ranks):
        if presence.version != ranks[0].version:
            found = gpu.nccl_words(presence.version)
            expected = gpu.nccl_words(ranks[0].version)
            _refuse(transport, rank, f"NCCL: expected {expected} as on rank 0, found {found}")
        other = first_on.setdefault(presence.device, rank)
        if other != rank and not (presence.may_share and ranks[other].may_share):
            _refuse(transport, rank, _same_device(rank, other, presence))


def _refuse(transport: Any, rank: int, text: str) -> None:
    raise RefusedError(f"rank {rank} of {transport.num_ranks}: {text}")


def _same_device(rank: int, other: int, presence: Presence) -> str:
    needed, found = gpu.nccl_words(SHARING_VERSION), gpu.nccl_words(presence.version)
    return (
        f"device: expected one for each rank, got {presence.device} for ranks {other} and {rank};"
        f" choose with torch.cuda.set_device, or let ranks share: NCCL {needed} or newer (found"
        f" {found}) and {SHARING}=1"
    )


def share_id(transport: Any, nccl: Any) -> bytes:
    """Let rank 0 make NCCL's id of a new communicator, for all ranks.  Collective.

    Raises:
        RefusedError: on all ranks alike, if it cannot.
    """
    failed, words = 0, np.zeros(texts.WORDS, np.int64)
    if transport.rank == 0:
        try:
            words[: ID_BYTES // 8] = np.frombuffer(nccl.get_unique_id(), np.int64)
        except Exception as error:
            failed, words = 1, texts.pack(f"NCCL: no id for a communicator: {error}")
    sent = np.tile(np.concatenate([[failed], words]), (transport.num_ranks, 1))
    failed, *received = transport.exchange_counts(sent)[0]
    words = np.array(received, np.int64)
    if failed:
        _refuse(transport, 0, texts.unpack(words))
    return words.tobytes()[:ID_BYTES]
