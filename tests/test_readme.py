"""The README's example runs as written, on real ranks."""

import re
import subprocess
import sys

import ranks


def test_the_example_runs_under_mpirun(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ranks.ROOT / "README.md").read_text(), re.S)
    script = tmp_path / "example.py"
    shape = "assert y.shape == (256, 1024) and codes.shape == (256, 1024), (y.shape, codes.shape)\n"
    script.write_text("\n".join(block for block in blocks if ".cuda" not in block) + shape)
    ranks.passed(ranks.mpirun(2, script))


def test_import_from_the_folder_above_the_checkout():
    """The checkout's own folder, if it is called fp4comm, must not be taken for the package."""
    code = "import fp4comm; print(fp4comm.AllToAll.__name__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ranks.ROOT.parent, capture_output=True, text=True)
    assert done.stdout.strip() == "AllToAll", done.stderr
