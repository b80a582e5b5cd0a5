"""The README's example runs as written, on real ranks."""

import re

import ranks


def test_the_example_runs_under_mpirun(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ranks.ROOT / "README.md").read_text(), re.S)
    script = tmp_path / "example.py"
    shape = "assert y.shape == (256, 1024) and codes.shape == (256, 1024), (y.shape, codes.shape)\n"
    script.write_text("\n".join(blocks) + shape)
    ranks.passed(ranks.mpirun(2, script))
