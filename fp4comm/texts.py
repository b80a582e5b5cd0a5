"""Texts as int64 words, as ranks send them along with counts."""

from __future__ import annotations

import numpy as np

WORDS = 64  # of a text: 512 bytes


def pack(text: str) -> np.ndarray:
    """Return a text as ``[WORDS]`` int64, cut if it is too long."""
    data = text.encode(errors="replace")[: 8 * WORDS].ljust(8 * WORDS, b"\0")
    return np.frombuffer(data, np.int64)


def unpack(words: np.ndarray) -> str:
    """Return the text of packed words."""
    return words.tobytes().rstrip(b"\0").decode(errors="replace")
