"""Entry points that vLLM and SGLang call when they start.  They act where FP4COMM_WIRE is set.

FP4COMM_WIRE names the wire format of dispatch: ``mxfp4``, ``mxfp8``, ``fp8`` or ``bf16``.
"""

import os

from fp4comm.integrations._common import WIRE


def vllm() -> None:
    """Entry point of group ``vllm.general_plugins``."""
    if wire := os.environ.get(WIRE):
        from fp4comm.integrations.vllm import install

        install(wire)


def sglang() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    if wire := os.environ.get(WIRE):
        from fp4comm.integrations.sglang import install

        install(wire)
