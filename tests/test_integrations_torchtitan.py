"""The adapter for torchtitan inside its MoE block, on CPU ranks: mpi/torchtitan_layers.py."""

import importlib
import importlib.util
import sys

import pytest
import ranks

NEEDED = "torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser triton"


def test_blocks_on_four_ranks():
    """Four ranks are one group of experts, then two."""
    if not all(map(importlib.util.find_spec, ("torchtitan", "spmd_types", "tyro", "triton"))):
        pytest.skip(f"pip install --no-deps {NEEDED}")
    quiet = {"PYTHONWARNINGS": "ignore"}
    runs = ranks.torch_ranks(4, "torchtitan_layers.py", "cpu", 4, 2, env=quiet)
    ranks.passed(*runs)
    for num in (4, 2):
        assert all(f"{num} right with spmd_types" in run.stdout for run in runs)


def test_without_torchtitan_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan.config", None)
    monkeypatch.delitem(sys.modules, "fp4comm.integrations.torchtitan", raising=False)
    with pytest.raises(ImportError, match=r"torchtitan needs .*pip install torchtitan==0.3.0"):
        importlib.import_module("fp4comm.integrations.torchtitan")
