"""What adapters add to AllToAll: small, on CPU ranks, where times say nothing."""

import importlib.util
import json

import pytest
import ranks

SIZES = {"tokens": 16, "hidden": 64, "experts": 8, "topk": 2, "wire": "mxfp4"}
PACKAGES = {"Megatron-Core": "megatron", "torchtitan": "torchtitan", "Transformers": "transformers"}


def test_results_are_equal_and_what_is_missing_is_said(tmp_path):
    installed = {name for name, module in PACKAGES.items() if importlib.util.find_spec(module)}
    if not installed:
        pytest.skip("pip install transformers, or another of the frameworks")
    options = [text for name, value in SIZES.items() for text in (f"--{name}", value)]
    script, file = ranks.ROOT / "benchmarks" / "bench_adapters.py", tmp_path / "out.json"
    more = "--device", "cpu", "--iterations", 1, "--json", file
    quiet = {"PYTHONWARNINGS": "ignore"}
    runs = ranks.torch_ranks(2, script, *more, *options, timeout=240, env=quiet)
    ranks.passed(*runs)
    result = json.loads(file.read_text())
    assert result["arguments"] == SIZES
    assert {row["adapter"] for row in result["rows"]} == installed
    assert len(result["not_measured"]) == len(PACKAGES) - len(installed)
    assert len(result["rows"]) == 2 * len(installed)
    assert all(row["num_wrong"] == 0 and row["through_us"] > 0 for row in result["rows"])
