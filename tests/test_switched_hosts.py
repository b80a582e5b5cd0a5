"""benchmarks/switched_hosts.py: hosts that are network namespaces, where they can be made."""

import shutil
import subprocess

import pytest
import ranks

SCRIPT = ranks.ROOT / "benchmarks" / "switched_hosts.py"
TELL = "import os; print('of', os.environ['WORLD_SIZE'], os.environ['NCCL_HOSTID'])"


def namespaces():
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    return {line.split()[0] for line in done.stdout.splitlines()}


@pytest.fixture
def before():
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs iproute2")
    found = namespaces()
    made = subprocess.run(["ip", "netns", "add", "fp4comm-try"], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"needs to make network namespaces: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "delete", "fp4comm-try"], check=True)
    return found


def test_ranks_run_on_hosts_that_are_gone_afterwards(before):
    done = ranks.python(SCRIPT, "--hosts", 2, "--ranks", 2, "--", "-c", TELL)
    if "tbf" in done.stdout and done.returncode == 2:
        pytest.skip(f"needs tc's tbf: {done.stdout.strip()}")
    ranks.passed(done)
    assert "of 4 fp4comm-" in done.stdout
    assert "-host0" in done.stdout
    assert namespaces() == before


def test_a_rank_that_fails_is_told_and_its_hosts_are_gone(before):
    fail = "import os, sys; sys.exit(int(os.environ['RANK']))"
    done = ranks.python(SCRIPT, "--hosts", 2, "--", "-c", fail)
    if "tbf" in done.stdout and done.returncode == 2:
        pytest.skip(f"needs tc's tbf: {done.stdout.strip()}")
    assert done.returncode == 1, ranks.report(done)
    assert namespaces() == before
