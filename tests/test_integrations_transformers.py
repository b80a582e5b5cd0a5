"""Hugging Face Transformers: the conformance test, four models and mistakes, on two ranks."""

import importlib.util

import pytest
import ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs pip install 'transformers>=5.20'",
)


def test_models_with_their_experts_on_two_ranks():
    runs = ranks.torch_ranks(2, "transformers_models.py", timeout=300)
    ranks.passed(*runs)
    for kind in ("Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"):
        for run in runs:
            assert f"{kind} bf16 right" in run.stdout, ranks.report(run)
            assert f"{kind} mxfp4 right" in run.stdout, ranks.report(run)
