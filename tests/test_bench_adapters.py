"""What adapters add to AllToAll: small, on CPU ranks, where times say nothing."""

import importlib.util
import json
import sys

import pytest
import ranks

SCRIPT = ranks.ROOT / "benchmarks" / "bench_adapters.py"
SIZES = {"tokens": 16, "hidden": 64, "experts": 8, "topk": 2, "wire": "mxfp4"}
ARGUMENTS = {**SIZES, "device": "cpu", "iterations": 1}
OPTIONS = [text for name, value in ARGUMENTS.items() for text in (f"--{name}", value)]
PACKAGES = {"Megatron-Core": "megatron", "torchtitan": "torchtitan", "Transformers": "transformers"}
WITHOUT_FRAMEWORKS = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import bench_adapters

def missing(group, inputs, **options):
    raise ImportError("not here")

bench_adapters.ADAPTERS = dict.fromkeys(bench_adapters.ADAPTERS, missing)
bench_adapters.run_command(bench_adapters.main)
"""


def test_results_are_equal_and_what_is_missing_is_said(tmp_path):
    installed = {name for name, module in PACKAGES.items() if importlib.util.find_spec(module)}
    if not installed:
        pytest.skip("pip install transformers, or another of the frameworks")
    file = tmp_path / "out.json"
    quiet = {"PYTHONWARNINGS": "ignore"}
    runs = ranks.torch_ranks(2, SCRIPT, *OPTIONS, "--json", file, env=quiet)
    ranks.passed(*runs)
    result = json.loads(file.read_text())
    assert result["arguments"] == ARGUMENTS
    assert sorted((row["adapter"], row["passes"]) for row in result["rows"]) == sorted(
        (name, passes) for name in installed for passes in ("forward", "forward and backward")
    )
    assert len(result["not_measured"]) == len(PACKAGES) - len(installed)
    for row in result["rows"]:
        assert row["num_wrong"] == 0
        assert row["direct_peak_bytes"] is row["through_peak_bytes"] is None
    assert "2 ranks, device cpu, transport torch (gloo); dispatch in mxfp4" in runs[0].stdout


def test_rows_that_differ_are_counted(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    import torch
    from bench_adapters import wrong_rows

    y, grad = torch.zeros(4, 3), torch.zeros(4, 2)
    other = y.clone()
    other[1, :2] = 1
    other[3, 0] = torch.nan
    assert wrong_rows([y, grad], [y, grad]) == 0
    assert wrong_rows([other, grad], [y, grad + 1]) == 2 + 4


def test_where_no_framework_is_it_says_so(tmp_path):
    program, file = tmp_path / "without.py", tmp_path / "out.json"
    program.write_text(WITHOUT_FRAMEWORKS)
    [done] = ranks.torch_ranks(1, program, *OPTIONS, "--json", file)
    assert done.returncode == 2, done.stdout
    missing = [f"{name}: not measured: not here" for name in PACKAGES.values()]
    assert all(f"# {text}" in done.stdout for text in missing)
    result = json.loads(file.read_text())
    assert (result["rows"], result["not_measured"]) == ([], missing)


def test_without_a_launcher_it_names_what_it_lacks():
    done = ranks.python(SCRIPT, *OPTIONS)
    assert done.returncode == 2
    assert done.stdout.startswith("Error: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: expected")


def test_a_mistake_is_told_by_one_rank():
    runs = ranks.torch_ranks(2, SCRIPT, *OPTIONS, "--topk", 9)
    assert [run.returncode for run in runs] == [2, 2], ranks.report(*runs)
    assert runs[0].stdout == "Error: topk: expected at most 8 (experts), got 9\n"
    assert runs[1].stdout == ""
