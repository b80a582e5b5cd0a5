"""The adapter for Megatron-Core inside its MoELayer, on CPU ranks: mpi/megatron_layers.py."""

import importlib
import importlib.util
import sys

import pytest
import ranks


def test_layers_on_four_ranks():
    """Four ranks are one group of experts, then two."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("pip install megatron-core==0.16.1")
    runs = ranks.torch_ranks(4, "megatron_layers.py", "cpu", 4, 2, env={"PYTHONWARNINGS": "ignore"})
    ranks.passed(*runs)
    for num in (4, 2):
        assert all(f"{num} right" in run.stdout for run in runs), ranks.report(*runs)


def test_without_megatron_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.dist_checkpointing.mapping", None)
    monkeypatch.delitem(sys.modules, "fp4comm.integrations.megatron", raising=False)
    with pytest.raises(ImportError, match=r"megatron needs .*pip install megatron-core==0.16.1"):
        importlib.import_module("fp4comm.integrations.megatron")
