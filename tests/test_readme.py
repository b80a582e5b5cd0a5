"""The examples of the README and of docs/ run as written, on real ranks."""

import importlib.util
import re
import subprocess
import sys

import pytest
import ranks

DOCUMENTS = [ranks.ROOT / "README.md", *sorted((ranks.ROOT / "docs").glob("*.md"))]
BLOCKS = [
    block
    for document in DOCUMENTS
    for block in re.findall(r"```python\n(.*?)```", document.read_text(), re.S)
]
ELSEWHERE = ".cuda", "dist.", "megatron"  # on a GPU; below; in its own tests


def programs():
    """Examples on groups of torch.distributed; one that opens no group goes on from the last."""
    found = []
    for block in BLOCKS:
        if "dist.init_process_group" in block:
            found.append(block)
        elif "dist." in block:
            found[-1] += block
    return found


def test_the_examples_run_under_mpirun(tmp_path):
    blocks = [block for block in BLOCKS if not any(text in block for text in ELSEWHERE)]
    script = tmp_path / "example.py"
    shape = "assert y.shape == (256, 1024) and codes.shape == (256, 1024), (y.shape, codes.shape)\n"
    script.write_text("\n".join([*blocks, shape]))
    ranks.passed(ranks.mpirun(2, script))


@pytest.mark.parametrize(("number", "num_ranks"), [(0, 4), (1, 2)])
def test_examples_on_groups_of_torch_distributed(tmp_path, number, num_ranks):
    program = programs()[number]
    (tmp_path / "example.py").write_text(program)
    if "transformers" in program and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    done = ranks.torch_ranks(num_ranks, tmp_path / "example.py")
    ranks.passed(*done)
    shown = program.count("print(")
    assert all(run.stdout.count(f"rank {rank}: (") == shown for rank, run in enumerate(done))
    assert len(programs()) == 2


def test_import_from_the_folder_above_the_checkout():
    """The checkout's own folder, if it is called fp4comm, must not be taken for the package."""
    code = "import fp4comm; print(fp4comm.AllToAll.__name__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ranks.ROOT.parent, capture_output=True, text=True)
    assert done.stdout.strip() == "AllToAll", done.stderr
