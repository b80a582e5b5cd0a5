"""The SGLang adapter against SGLang itself: its interface, settings, factory and output types.

Last run with sglang 0.5.23, on a machine without a GPU; see the adapter for what was not run.
"""

import importlib.util

import pytest
import ranks


@pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="needs: pip install sglang")
def test_a_dispatcher_that_sglang_made():
    ranks.passed(ranks.python("sglang_experts.py"))
