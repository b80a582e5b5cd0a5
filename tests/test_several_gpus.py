"""benchmarks/several_gpus.py as far as it goes without a GPU: what needs none, and what fails."""

import json
import sys

import pytest
import ranks
import torch

from fp4comm.cli import cli

SCRIPT = ranks.ROOT / "benchmarks" / "several_gpus.py"


def start(*arguments):
    return ranks.python(SCRIPT, *arguments)


def test_a_step_writes_its_file_and_what_it_printed(tmp_path):
    done = start("-n", 4, "--out", tmp_path, "--only", "plan_hgx-h200-400g_2048")
    ranks.passed(done)
    name = "plan_hgx-h200-400g_2048_3072"
    planned = json.loads((tmp_path / f"{name}_4_gpus.json").read_text())
    assert {row["format"] for row in planned["rows"]} == {"bf16", "fp8", "mxfp8", "mxfp4"}
    assert "4 ranks" in (tmp_path / f"{name}.txt").read_text()


def test_a_failing_step_is_named_and_the_next_one_runs(tmp_path):
    done = start("-n", 2, "--out", tmp_path, "--only", "plan_links,plan_hgx-h200-400g_2048")
    assert done.returncode == 1
    ended = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert ended.pop("plan_hgx-h200-400g_2048_3072").endswith("ok")
    assert len(ended) == 4
    assert all(text.endswith("exit code 2") for text in ended.values())
    assert (
        "links_2_gpus.toml: expected a topology"
        in (tmp_path / "plan_links_2_gpus_2048_3072.txt").read_text()
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure")
def test_without_a_gpu_it_says_so_at_once(tmp_path):
    done = start("-n", 2, "--out", tmp_path)
    assert done.returncode == 2
    assert "GPU: expected an NVIDIA GPU" in done.stdout


def test_nccl_is_for_ranks_that_share_a_gpu(tmp_path):
    done = start("-n", 2, "--out", tmp_path, "--nccl", tmp_path)
    assert done.returncode == 2
    assert "nccl: expected with --one-gpu" in done.stdout


def test_its_tests_and_benchmarks_are_those_of_the_checkout():
    """Each command's options are known to the command that it starts."""
    sys.path.insert(0, str(SCRIPT.parent))
    import several_gpus

    commands = {("-m", "fp4comm", name): command for name, command in cli.commands.items()}
    for step in several_gpus.steps(2, ranks.ROOT, 60.0):
        command = commands.get(step.arguments[:3])
        if command is None:
            assert (ranks.ROOT / step.arguments[0]).is_file()
            continue
        known = {option for parameter in command.params for option in parameter.opts}
        options = [text.partition("=")[0] for text in step.arguments if text.startswith("--")]
        assert set(options) <= known, step.name
