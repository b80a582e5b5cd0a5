"""What all work on a GPU needs here, and how to say what is missing."""

from __future__ import annotations

import torch

ALIGNMENT = 16  # bytes, of the widest access of a kernel


def missing() -> str | None:
    """Return ``needs ...``, what torch lacks for a GPU, or None."""
    if torch.version.cuda is None:
        return f"needs a torch built for CUDA, got torch {torch.__version__}"
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU and its driver"
    return None


def install() -> str:
    """The command that installs CuPy, NVRTC and NCCL for torch's CUDA."""
    return f"pip install 'fp4comm[cuda{(torch.version.cuda or '12').split('.')[0]}]'"


def nccl_words(version: int) -> str:
    """Write NCCL's number of a version: 22809 as 2.28.9, and 2804 as 2.8.4."""
    major, rest = divmod(version, 10000 if version > 9999 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
