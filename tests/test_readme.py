"""The README's examples run as written, on real ranks."""

import importlib.util
import re
import subprocess
import sys

import pytest
import ranks

BLOCKS = re.findall(r"```python\n(.*?)```", (ranks.ROOT / "README.md").read_text(), re.S)
ELSEWHERE = ".cuda", "dist.init_process_group", "megatron"  # on a GPU; below; in its own tests
ON_GROUPS = [block for block in BLOCKS if "dist.init_process_group" in block]


def test_the_example_runs_under_mpirun(tmp_path):
    blocks = [block for block in BLOCKS if not any(text in block for text in ELSEWHERE)]
    script = tmp_path / "example.py"
    shape = "assert y.shape == (256, 1024) and codes.shape == (256, 1024), (y.shape, codes.shape)\n"
    script.write_text("\n".join([*blocks, shape]))
    ranks.passed(ranks.mpirun(2, script))


@pytest.mark.parametrize(("number", "num_ranks"), [(0, 4), (1, 2)])
def test_examples_on_groups_of_torch_distributed(tmp_path, number, num_ranks):
    (tmp_path / "example.py").write_text(ON_GROUPS[number])
    if "transformers" in ON_GROUPS[number] and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    done = ranks.torch_ranks(num_ranks, tmp_path / "example.py", timeout=120)
    ranks.passed(*done)
    assert all(f"rank {rank}: (" in run.stdout for rank, run in enumerate(done))
    assert len(ON_GROUPS) == 2


def test_import_from_the_folder_above_the_checkout():
    """The checkout's own folder, if it is called fp4comm, must not be taken for the package."""
    code = "import fp4comm; print(fp4comm.AllToAll.__name__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ranks.ROOT.parent, capture_output=True, text=True)
    assert done.stdout.strip() == "AllToAll", done.stderr
