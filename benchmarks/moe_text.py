"""The text that train_moe.py learns from: bytes of files, some of them held out."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from fp4comm.bench.clock import gather
from fp4comm.transport import Transport

HELD_OUT = 20  # one byte in so many
INSTALLED = {"site-packages", "dist-packages"}  # no part of the standard library


class Text:
    """Bytes to learn from, and the last twentieth of each file, held out.

    Args:
        folder: whose files, other than those with a zero byte, are the text; None is the standard
            library's sources.
        shortest: bytes that either part must have.
    """

    def __init__(self, folder: Path | None, shortest: int) -> None:
        """Read the files, sorted by name."""
        self.name = "the standard library's sources" if folder is None else folder.resolve().name
        files = list(contents(folder))
        cuts = [len(content) - len(content) // HELD_OUT for content in files]
        training = b"".join(content[:cut] for content, cut in zip(files, cuts, strict=True))
        held_out = b"".join(content[cut:] for content, cut in zip(files, cuts, strict=True))
        if min(len(training), len(held_out)) < shortest:
            raise ValueError(
                f"text: expected at least {shortest} bytes to learn from and as many held out, got"
                f" {len(training)} and {len(held_out)} in {len(files)} files"
            )
        self.training, self.held_out = (np.frombuffer(b, np.uint8) for b in (training, held_out))
        self.checksum = zlib.crc32(held_out, zlib.crc32(training))


def check_same_text(group: Transport, text: Text) -> None:
    """Refuse different texts on different ranks; collective."""
    checksums = gather(group, [text.checksum])[:, 0]
    differs = np.flatnonzero(checksums != checksums[0])
    if len(differs):
        raise ValueError(f"text: expected the same on all ranks, got another on rank {differs[0]}")


def contents(folder: Path | None) -> Iterator[bytes]:
    """Read the files of a text."""
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    for file in sorted(root.rglob("*.py" if folder is None else "*")):
        installed = folder is None and INSTALLED & set(file.relative_to(root).parts)
        if file.is_file() and not installed and b"\0" not in (content := file.read_bytes()):
            yield content


def windows(source: np.ndarray, starts: np.ndarray, length: int) -> torch.Tensor:
    """Cut ``[len(starts), length + 1]`` bytes out, the last one a target only."""
    cut = source[starts[:, None] + np.arange(length + 1)]
    return torch.from_numpy(cut).long()
