"""Ranks that are processes with NCCL: rounds, mistakes and streams to the bytes of the reference.

With a GPU for each rank, one a rank; else all share one GPU by benchmarks/one_gpu.py, which needs
NCCL 2.30 or newer: FP4COMM_NCCL names its library, packed or not, or its folder.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import ranks
import torch
from compiled import kernels_are_compiled  # noqa: F401

sys.path.insert(0, str(ranks.ROOT / "benchmarks"))

import one_gpu

GPU_TESTS = Path(__file__).resolve().parent
ONE_GPU = ranks.ROOT / "benchmarks" / "one_gpu.py"
LIMIT_S = 120  # of a program
RIGHT = {
    "rounds": "rounds right",
    "mistakes": "mistakes right",
    "gradients": "gradients right",
    "two_hop": "two hops right",
}
EVERY_PART = ("rounds", "mistakes", "streams", "gradients")


@pytest.fixture(scope="session")
def nccl(tmp_path_factory):
    """The library that takes several ranks on one GPU, unpacked once; or why there is none."""
    given = os.environ.get("FP4COMM_NCCL")
    try:
        library = one_gpu.find_nccl(Path(given) if given else None, tmp_path_factory.mktemp("nccl"))
    except one_gpu.SetupError as lacks:
        return None, f"{lacks.message} (FP4COMM_NCCL may name one)"
    return library, None


@pytest.fixture(scope="session", autouse=True)
def transport_is_there(tmp_path_factory):
    """Ask in another process: MPI must not start in this one, which starts mpirun."""
    script = tmp_path_factory.mktemp("ask") / "ask.py"
    script.write_text("from fp4comm import transport; print(transport.available()['nccl'] or '')")
    asked = ranks.python(script)
    ranks.passed(asked)
    lacks = asked.stdout.strip().rpartition("\n")[2]
    if lacks:
        pytest.skip(lacks)


@pytest.fixture
def launch(nccl):
    """Run a program on ranks; return CompletedProcess."""

    def run(num_ranks, *program, nodes=1):
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
        command = (GPU_TESTS / "limited.py", LIMIT_S, *program)
        if nodes == 1 and torch.cuda.device_count() >= num_ranks:
            return ranks.mpirun(num_ranks, *command, timeout=LIMIT_S + 30, env=env)
        library, lacks = nccl
        if library is None:
            pytest.skip(lacks)
        options = ("-n", num_ranks, "--nodes", nodes, "--nccl", library, *mps())
        command = (sys.executable, *command)
        return ranks.python(ONE_GPU, *options, *command, timeout=LIMIT_S + 30, env=env)

    return run


@pytest.fixture
def run_ranks(launch):
    """Run a program on ranks, and fail with what they wrote if one of them failed."""

    def run(*args, **options):
        done = launch(*args, **options)
        ranks.passed(done)
        return done.stdout

    return run


def mps():
    """Without the program that starts MPS ranks take turns, which is slow and right."""
    try:
        one_gpu.check_mps()
    except one_gpu.SetupError:
        return ("--no-mps",)
    return ()


PROGRAM = GPU_TESTS / "rank_program.py"
PARTS = {
    "2 ranks": (2, 1, EVERY_PART),
    "8 ranks": (8, 1, ("rounds",)),
    "4 ranks on 2 nodes": (4, 2, EVERY_PART),
    "8 ranks on 2 nodes": (8, 2, ("rounds",)),
    "two hops, 4 ranks on 2 nodes": (4, 2, ("two_hop",)),
    "two hops, 3 ranks on 3 nodes": (3, 3, ("two_hop",)),
}


@pytest.mark.parametrize("name", PARTS)
def test_nccl(run_ranks, name):
    num_ranks, nodes, parts = PARTS[name]
    output = run_ranks(num_ranks, PROGRAM, "nccl", *parts, nodes=nodes)
    check(output, num_ranks, parts)


def test_a_torch_group_with_nccl(run_ranks):
    check(run_ranks(2, PROGRAM, "torch", *EVERY_PART), 2, EVERY_PART)


def test_mpi_stages_rows_of_a_gpu():  # COM-36, COM-37, STR-08; needs no NCCL
    command = (GPU_TESTS / "limited.py", LIMIT_S, PROGRAM, "mpi", *EVERY_PART)
    done = ranks.mpirun(2, *command)
    ranks.passed(done)
    check(done.stdout, 2, EVERY_PART)


@pytest.mark.parametrize("options", [(4, 2), (4, 1, "--torch")], ids=["MPI", "torch"])
def test_the_transport_keeps_its_promises(run_ranks, options):
    num_ranks, nodes, *flags = options
    output = run_ranks(num_ranks, GPU_TESTS / "nccl_cases.py", *flags, nodes=nodes)
    assert "all passed in" in output


@pytest.mark.parametrize(
    ("name", "may_succeed"),
    [("uncaught", False), ("unclosed", True), ("under_way", True), ("left", False)],
)
def test_the_job_ends_however_the_processes_do(launch, name, may_succeed):
    done = launch(2, GPU_TESTS / "nccl_cases.py", "--exit", name)
    assert "Timeout (" not in done.stdout, ranks.report(done)  # of limited.py
    assert may_succeed or done.returncode != 0, ranks.report(done)


def check(output, num_ranks, parts):
    for part, text in RIGHT.items():
        assert output.count(text) == (num_ranks if part in parts else 0), output[-4000:]
    if "streams" in parts or "two_hop" in parts:
        assert output.count("ok str_17") == num_ranks, output[-4000:]


@pytest.mark.parametrize("nodes", [1, 2])
def test_bench_on_nccl_ranks(run_ranks, tmp_path, nodes):
    sizes = ("--tokens", 96, "--hidden", 640, "--experts", 12, "--topk", 3, "--check-all")
    calls = ("--warmup", 1, "--iterations", 2, "--json", tmp_path / "out.json")
    output = run_ranks(
        2 * nodes, "-m", "fp4comm", "bench", "--device", "cuda", *sizes, *calls, nodes=nodes
    )
    assert output.count("# wrong rows: 0 OK") == 1
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["transport"].startswith("nccl (NCCL 2.")
    assert (content["ranks"], content["nodes"], content["wrong_rows"]) == (2 * nodes, nodes, 0)
    assert content["gpus"] >= 1
    assert [row["op"] for row in content["rows"]] == ["plain", *["dispatch", "combine"] * 4]
