"""The adapter for Megatron-Core inside its MoELayer, on CPU ranks: mpi/megatron_layers.py."""

import subprocess
import sys

import pytest
import ranks


def test_layers_on_four_ranks():
    """Four ranks are one group of experts, then two."""
    pytest.importorskip("megatron.core", reason="pip install megatron-core==0.16.1")
    runs = ranks.torch_ranks(
        4, "megatron_layers.py", "cpu", 4, 2, timeout=240, env={"PYTHONWARNINGS": "ignore"}
    )
    ranks.passed(*runs)
    for num in (4, 2):
        assert all(f"{num} right" in run.stdout for run in runs), ranks.report(*runs)


def test_without_megatron_the_error_says_what_to_install():
    code = "import sys; sys.modules['megatron'] = None; import fp4comm.integrations.megatron"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: fp4comm.integrations.megatron needs megatron-core" in done.stderr
    assert "pip install megatron-core==0.16.1" in done.stderr
