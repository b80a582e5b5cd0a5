"""The vLLM adapter against vLLM itself: its interface, and a kernel of its on CPU ranks.

Last run with vllm 0.33.0, on a machine without a GPU; see the adapter for what was not run.
"""

import importlib.util

import pytest
import ranks


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs: pip install vllm")
def test_a_kernel_of_vllm_on_two_ranks():
    ranks.passed(*ranks.torch_ranks(2, "vllm_experts.py"))
