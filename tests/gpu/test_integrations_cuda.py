"""Layers of Megatron-Core and blocks of torchtitan on a GPU: mpi/megatron_layers.py and the like.

Two ranks share a GPU over gloo, or have one each with NCCL.  Here alone: Megatron's all-to-all
dispatcher, which needs a CUDA stream, and recomputed layers.
"""

import pytest
import ranks


@pytest.mark.parametrize(
    ("framework", "needed"),
    [
        ("megatron", "megatron-core==0.16.1"),
        ("torchtitan", "torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser"),
    ],
)
def test_layers_on_two_ranks(framework, needed):
    name = "megatron.core" if framework == "megatron" else framework
    pytest.importorskip(name, reason=f"pip install --no-deps {needed}")
    quiet = {"PYTHONWARNINGS": "ignore"}
    runs = ranks.torch_ranks(2, f"{framework}_layers.py", "cuda", 2, env=quiet)
    ranks.passed(*runs)
    assert all("2 right" in run.stdout for run in runs), ranks.report(*runs)
