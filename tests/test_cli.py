"""The command line: what it prints and writes, exit codes, and errors that one rank reports."""

import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from command_line import run

from fp4comm import __version__, agreement, launch, machine, transport
from fp4comm.bench import check as bench_check
from fp4comm.bench.environment import Environment, Place
from fp4comm.bench.report import header_lines
from fp4comm.bench.settings import Settings
from fp4comm.cli import DEMO_FILES, comparable

SCRIPT = Path(__file__).resolve().parent / "run_cli.py"
DATA = Path(__file__).resolve().parent / "data" / "layer0.safetensors"
TINY = ["--tokens", "24", "--hidden", "160", "--experts", "6", "--topk", "3"]
TINY += ["--warmup", "1", "--iterations", "2"]
FORMATS = ["bf16", "fp8", "mxfp8", "mxfp4"]


def rows_of(output):
    """Cells of the benchmark's rows."""
    return [line.split() for line in output.splitlines() if line and not line.startswith("#")]


# bench


def test_bench_prints_a_row_for_each_operation_and_wire_format():
    result = run("bench", *TINY, "--ranks", 2)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "# wrong rows: 0 OK"
    rows = rows_of(result.output)
    assert [row[:2] for row in rows] == [
        ["plain", "bf16"],
        *(cells for wire in FORMATS for cells in (["dispatch", wire], ["combine", "bf16"])),
    ]
    assert {len(row) for row in rows} == {16}
    vs_bf16, vs_plain = ([row[column] for row in rows] for column in (-3, -2))
    assert vs_bf16[:3] == ["-", "1.00", "1.00"]  # bf16 against itself
    assert [cell == "-" for cell in vs_plain] == [True, *[False, True] * 4]  # dispatches alone
    header = "\n".join(line for line in result.output.splitlines() if line.startswith("#"))
    for text in (
        f"fp4comm {__version__}  bench --tokens 24",
        "ranks 2",
        "transport local",
        "x ~ N(0,1) bf16, skew 0.00, seed 0; hidden 160, top-3 of 6 experts",
        "1 warm-up, 2 timed",
        "contents of 48 of 48 tokens",
        "first plain",
        "first dispatch",
        "whole call",
    ):
        assert text in header


def test_wire_formats_are_repeated_or_listed_and_compared_with_bf16_only_if_it_is_there():
    result = run("bench", *TINY, "--wire", "mxfp4,fp8", "--wire", "fp8", "--combine", "same")
    plain, *rows = rows_of(result.output)
    assert plain[:2] == ["plain", "bf16"]
    assert [row[1] for row in rows] == ["mxfp4", "mxfp4", "fp8", "fp8"]
    assert {row[-3] for row in rows} == {"-"}


def test_the_plain_all_to_all_can_be_left_out():
    rows = rows_of(run("bench", *TINY, "--wire", "bf16", "--no-plain").output)
    assert [row[0] for row in rows] == ["dispatch", "combine"]
    assert {row[-2] for row in rows} == {"-"}


def test_one_rank_sends_nothing_to_others():
    result = run("bench", *TINY, "--ranks", 1, "--wire", "bf16")
    assert [row[-4] for row in rows_of(result.output)] == ["0.000"] * 3


def test_rows_above_the_link_are_marked():  # BEN-09
    marked = run("bench", *TINY, "--wire", "bf16", "--link-gbs", 1e-9).output
    assert [row[-1] for row in rows_of(marked)] == ["!"] * 3
    assert "3 rows above the stated link peak of 1e-09 GB/s" in marked
    assert "!" not in run("bench", *TINY, "--wire", "bf16", "--link-gbs", 1e9).output


def test_several_sizes_are_cases_in_one_table(tmp_path):
    file = tmp_path / "out.json"
    options = ["--topk", "2", "--skew", "0,balanced", "--wire", "mxfp4"]
    result = run("bench", *TINY, *options, "--also", "round_trip", "--json", file)
    assert result.exit_code == 0, result.output
    heads = [line.split() for line in result.output.splitlines() if line.endswith("#wrong")]
    names = ["op", "format", "route", "tokens", "topk", "skew"]
    assert [head[1:7] for head in heads] == [names]  # once
    rows = rows_of(result.output)
    ops = ["plain", "dispatch", "combine", "round_trip"]
    cases = [["24", k, s] for k in "32" for s in ("0", "balanced")]
    assert [row[3:6] for row in rows] == [case for case in cases for _ in ops]
    assert [row[0] for row in rows] == ops * len(cases)
    assert "top-3/2 of 6 experts; 4 cases, one after the other" in result.output
    assert "contents of 192 of 192 tokens" in result.output
    assert result.output.splitlines()[-1] == "# wrong rows: 0 OK"
    contents = json.loads(file.read_text())
    skews = {"0": 0.0, "balanced": "balanced"}
    assert [[c["tokens"][0], c["topk"], c["arguments"]["skew"]] for c in contents] == [
        [int(t), int(k), skews[s]] for t, k, s in cases
    ]
    assert [c["arguments"]["topk"] for c in contents] == [3, 3, 2, 2]


def test_a_wrong_row_in_any_case_ends_with_1(monkeypatch):
    check = bench_check.Checker.combine

    def corrupting(checker, *arguments, **options):
        found = check(checker, *arguments, **options)
        is_second = checker.num_tokens_checked == 2
        return dataclasses.replace(found, num_wrong=1) if is_second else found

    monkeypatch.setattr(bench_check.Checker, "combine", corrupting)
    result = run("bench", *TINY, "--tokens", "1,2", "--wire", "bf16")
    assert result.exit_code == 1
    wrong = [int(row[-1]) for row in rows_of(result.output)]
    assert wrong == [0, 0, 0, 0, 0, 2, 0, 0, 0]  # the combine of 1 token on each of 2 ranks
    assert result.output.splitlines()[-1] == "# wrong rows: 2 FAILED"


def test_bench_on_recorded_data():
    options = ("--tokens", 16, "--wire", "mxfp4", "--warmup", 1, "--iterations", 1)
    result = run("bench", "--data", DATA, *options)
    assert result.exit_code == 0, result.output
    assert "x from layer0.safetensors; hidden 1024, top-8 of 64 experts" in result.output
    assert run("bench", "--data", DATA, *options, "--skew", "balanced").exit_code == 2


def test_a_wrong_row_of_bench_is_counted_and_ends_with_1(one_wrong_byte):
    result = run("bench", *TINY, "--wire", "bf16", "--arrive", "bf16")
    assert result.exit_code == 1
    assert all(int(row[-1]) > 0 for row in rows_of(result.output))
    assert result.output.splitlines()[-1].endswith(" FAILED")


def test_a_wrong_row_of_the_demo_ends_with_1(one_wrong_byte):
    result = run("demo", "--data", DATA, "--ranks", 2, "--warmup", 1, "--iterations", 1)
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith("FAILED: ")


def test_json_holds_machine_versions_commit_arguments_and_rows(tmp_path):
    file = tmp_path / "out.json"
    assert run("bench", *TINY, "--wire", "mxfp4", "--json", file).exit_code == 0
    content = json.loads(file.read_text())
    assert content["command"] == "bench"
    assert content["arguments"]["hidden"] == 160
    assert content["machine"]["cores"] >= content["machine"]["usable_cores"] >= 1
    assert content["versions"]["fp4comm"] == __version__
    assert content["git"] is None or set(content["git"]) == {"commit", "dirty"}
    assert (content["ranks"], content["hosts"], content["wrong_rows"]) == (2, 1, 0)
    assert (content["nodes"], content["gpus"]) == (1, 0)
    plain, dispatch, combine = content["rows"]
    assert (plain["op"], dispatch["op"], combine["op"]) == ("plain", "dispatch", "combine")
    assert dispatch["vs_plain"] > 0
    assert (dispatch["vs_bf16"], combine["vs_plain"], plain["vs_plain"]) == (None, None, None)
    assert dispatch["time"]["median_us"] > 0
    assert set(dispatch["parts_us"]) == {"plan", "counts", "quantize", "exchange", "arrive"}
    assert 15 < dispatch["sqnr_db"] < 25


def test_a_copy_of_a_checkout_is_told_its_commit(monkeypatch):
    monkeypatch.setenv("FP4COMM_COMMIT", "abc")
    assert machine.git() == {"commit": "abc", "dirty": None}


BAD = [
    (["--hidden", "100"], "hidden: expected a multiple of 32, got 100"),
    (["--topk", "7"], "topk: expected at most 6"),
    (["--warmup", "0"], "warmup: expected at least 1"),  # BEN-07
    (["--iterations", "0"], "iterations: expected at least 1"),
    (["--wire", "fp5"], "wire: expected one of bf16, fp8, mxfp8, mxfp4, got 'fp5'"),
    (["--combine", "fp5"], "combine: expected one of bf16, fp8, mxfp8, mxfp4, got 'fp5'"),
    (["--arrive", "fp4"], "arrive: expected one of fp8, bf16, packed"),
    (["--route", "flat,three_hop"], "route: expected one of flat, two_hop, auto, got 'three_hop'"),
    (["--ranks-per-node", "3"], "ranks_per_node: expected a divisor of 2 ranks"),
    (["--also", "round_trip,all"], "also: expected one of round_trip, overlap, got 'all'"),
    (["--also", "overlap"], "also: expected overlap with device cuda alone, got cpu (there the ex"),
    (["--tokens", "1,2.5"], "tokens: expected whole numbers, got '2.5'"),
    (["--alignment", "0"], "alignment: expected at least 1"),
    (["--skew", "-2"], "skew: expected"),
    (["--ranks", "0"], "ranks: expected at least 1, got 0"),
    (["--data", "nothing"], "data: expected a safetensors file, got nothing"),
    (["--timeout-s", "0"], "timeout_s: expected more than 0 seconds, got 0.0"),
    (["--transport", "nccl"], 'device: expected cuda with transport "nccl", got cpu'),
    (["--transport", "torch"], "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: expected to be set"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("transport_name", ["local", "mpi", "nccl", "auto"])
def test_cuda_without_a_gpu_says_what_is_missing(transport_name):
    result = run("bench", *TINY, "--device", "cuda", "--transport", transport_name)
    assert result.exit_code == 2
    assert result.output.startswith('Error: device: "cuda" cannot be used here: ')
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(("arguments", "text"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_mistakes_are_one_line_and_end_with_2(arguments, text):
    result = run("bench", *TINY, *arguments)
    assert result.exit_code == 2
    assert text in result.output
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(("node", "is_told"), [("2", True), ("1", False)])
def test_a_route_that_one_node_does_not_have_is_told(node, is_told):
    result = run("bench", *TINY, "--route", "flat,two_hop", "--ranks-per-node", node)
    assert result.exit_code == 0, result.output
    assert ("# route: on one node every route is the flat one" in result.output) == is_told


@pytest.mark.parametrize(
    "command", [("bench", *TINY[:4], "--routing"), ("plan", "--topology", "cpu-1g", "--routing")]
)
def test_what_is_read_is_not_written_over(tmp_path, command):
    file = tmp_path / "topk.npy"
    np.save(file, np.zeros((4, 2), np.int64))
    before = file.read_bytes()
    result = run(*command, file, "--json", tmp_path / "." / "topk.npy")
    assert result.exit_code == 2
    text = f"Error: json: expected another file than that of routing, got {file}\n"
    assert result.output == text
    assert file.read_bytes() == before


def test_a_folder_for_json_that_is_not_there_is_noticed_first(tmp_path):
    result = run("bench", *TINY, "--json", tmp_path / "nothing" / "out.json")
    assert result.exit_code == 2
    assert "no such folder" in result.output


def test_the_header_counts_hosts_virtual_nodes_and_gpus():
    places = [Place("h", node, gpu) for node in ("a", "b") for gpu in ("GPU-1", "GPU-2")]
    environment = Environment("bench", 4, "nccl", places, machine.machine(), machine.versions())
    assert (environment.num_hosts, environment.num_nodes, environment.num_gpus) == (1, 2, 2)
    lines = "\n".join(header_lines(environment, Settings(("bf16",), device="cuda")))
    assert "ranks 4, hosts h x4, virtual nodes a x2, b x2, 2 GPUs, transport nccl" in lines
    assert "until\n#   the device is synchronized again" in lines


# demo


def test_demo_shows_one_table_and_ends_with_ok():
    options = ("--ranks", 2, "--warmup", 1, "--iterations", 2)
    result = run("demo", "--data", DATA, *options)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 120
    assert result.output.isascii()
    assert lines[-1].startswith("OK: 0 wrong of ")
    assert "On one machine the wire is a memory copy" in result.output
    for label in (
        *("wire rows sent", "bytes on the wire", "route", "times smaller than bf16"),
        *("one copy per expert", "plan", "quantize", "counts", "exchange", "arrive", "reduce"),
        *("SQNR", "wrong rows"),
    ):
        assert any(label in line for line in lines), label
    smaller = next(line for line in lines if "times smaller" in line)
    assert smaller.split()[-8:-1:2] == ["1.00x", "1.94x", "1.90x", "3.54x"]


def test_demo_has_its_data_in_the_checkout_and_says_so_without(monkeypatch, tmp_path):
    assert all(file.is_file() for file in DEMO_FILES)
    monkeypatch.setattr("fp4comm.cli.DEMO_FILES", [tmp_path / "layer0.safetensors"])
    result = run("demo")
    assert result.exit_code == 2
    assert "not in the installed package" in result.output


# info


def test_info_names_versions_codecs_transports_and_threads(tmp_path):
    file = tmp_path / "info.json"
    result = run("info", "--json", file)
    assert result.exit_code == 0
    content = json.loads(file.read_text())
    assert content["codecs"]["cpu"] is None
    assert content["transports"]["local"] is None
    assert content["machine"]["kernel_threads"] >= 1
    for name in ("python", "torch", "numba", "mpi4py", "MPI library", "nccl", "threads", "CUDA"):
        assert name in result.output


def test_a_pinned_rank_has_one_thread_and_is_told_why(monkeypatch):  # INS-16
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("NUMBA_NUM_THREADS", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    content = machine.everything()
    assert content["machine"]["usable_cores"] == content["machine"]["kernel_threads"] == 1
    assert "--bind-to none" in "\n".join(machine.as_lines(content, launched_ranks=2))


@pytest.mark.parametrize("failure", ["RuntimeError('cannot load MPI')", "ImportError('libmpi')"])
def test_an_mpi_that_fails_to_load_spoils_nothing_else(tmp_path, failure):  # INS-09, INS-10
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text(f"raise {failure}\n")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ranks.ROOT)])}
    told = ranks.python(SCRIPT, "info", env=env)
    assert told.returncode == 0, told.stdout
    assert "pip install 'fp4comm[mpi]'" in told.stdout
    ran = ranks.python(SCRIPT, "bench", "--warmup", 0, env=env)  # comes as far as its own checks
    assert "warmup: expected" in ran.stdout


def test_a_codec_that_fails_to_load_is_told(monkeypatch):
    def fail():
        raise SystemError("numba needs another numpy")

    monkeypatch.setattr("fp4comm.codec.available", fail)
    assert "failed to load" in run("info").output


# Under launchers


def test_auto_takes_the_transport_of_the_launcher(monkeypatch):
    assert launch.choose("auto") == "local"
    assert launch.choose("mpi") == "mpi"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert launch.choose("auto") == "mpi"
    assert launch.choose("auto", "cuda") == "nccl"
    for name in launch.TORCH_VARIABLES:
        monkeypatch.setenv(name, "1")
    assert launch.choose("auto") == "torch"


def test_srun_is_a_launcher_and_a_batch_script_is_none(monkeypatch):
    for name, value in (("PROCID", 2), ("NTASKS", 4), ("LOCALID", 1)):
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert (launch.choose("auto"), launch.launched_ranks()) == ("local", 1)
    monkeypatch.setenv(launch.SLURM_SIZE, "4")
    assert (launch.launched_rank(), launch.launched_ranks(), launch.local_rank()) == (2, 4, 1)
    assert (launch.choose("auto"), launch.choose("auto", "cuda")) == ("mpi", "nccl")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert launch.choose("auto") == "torch"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")  # mpirun or torchrun, started by srun
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "5")
    assert (launch.launched_rank(), launch.launched_ranks()) == (5, 8)


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
NUMBER, PORT = "expected a whole number in", "expected a whole number in 1..65535"
LAUNCHED_WRONG = [  # what is set otherwise, or not at all
    (TORCHRUN, {"RANK": None}, "RANK: expected to be set"),
    (TORCHRUN, {"WORLD_SIZE": ""}, "WORLD_SIZE: expected to be set"),
    (TORCHRUN, {"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_ADDR, MASTER_PORT: expected to"),
    (TORCHRUN, {"RANK": "one"}, f"RANK: {NUMBER} 0..2147483647, got 'one'"),
    (TORCHRUN, {"RANK": "2"}, f"RANK: {NUMBER} 0..1, got '2'"),
    (TORCHRUN, {"WORLD_SIZE": "0"}, f"WORLD_SIZE: {NUMBER} 1..2147483647, got '0'"),
    (TORCHRUN, {"LOCAL_RANK": "-1"}, f"LOCAL_RANK: {NUMBER} 0..2147483647, got '-1'"),
    (TORCHRUN, {"MASTER_PORT": "http"}, f"MASTER_PORT: {PORT}, got 'http'"),
    (TORCHRUN, {"MASTER_PORT": "65536"}, f"MASTER_PORT: {PORT}, got '65536'"),
    (SRUN, {"SLURM_PROCID": None}, "SLURM_PROCID: expected to be set"),
    (SRUN, {"SLURM_PROCID": "x"}, f"SLURM_PROCID: {NUMBER} 0..2147483647, got 'x'"),
    (SRUN, {"SLURM_STEP_NUM_TASKS": "1"}, f"SLURM_PROCID: {NUMBER} 0..0, got '1'"),
    (SRUN, {"MASTER_PORT": None}, "MASTER_PORT: expected to be set"),
    (SRUN, {"RANK": "1"}, "WORLD_SIZE: expected to be set"),
]


@pytest.mark.parametrize(("right", "wrong", "text"), LAUNCHED_WRONG)
def test_a_launchers_variables_that_are_half_set_are_named(monkeypatch, right, wrong, text):
    for name, value in (right | wrong).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    result = run("bench", *TINY)
    assert result.exit_code == 2
    assert result.output.startswith(f"Error: {text}"), result.output
    assert result.output.count("\n") == 1


def test_an_address_to_meet_at_is_no_launcher(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert launch.choose("auto") == "local"


def test_a_rank_gets_the_gpu_of_its_place_on_its_machine(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("fp4comm.codec.available", lambda: {"cuda": None})
    for variable, rank in (("OMPI_COMM_WORLD_LOCAL_RANK", 6), ("LOCAL_RANK", 3)):
        monkeypatch.setenv(variable, str(rank))
        launch.use_device("cpu", launch.local_rank())
        launch.use_device("cuda", launch.local_rank())
    assert chosen == [2, 3]


def test_a_rank_alone_prints_and_torchrun_counts_before_the_mpi_around_it(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert (launch.launched_rank(), launch.launched_ranks()) == (0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert (launch.launched_rank(), launch.launched_ranks()) == (1, 2)
    for name, value in (("RANK", 3), ("WORLD_SIZE", 8), ("MASTER_ADDR", "a"), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    assert (launch.launched_rank(), launch.launched_ranks(), launch.local_rank()) == (3, 8, 3)


def test_a_rank_without_a_launchers_word_takes_its_own_number(monkeypatch):
    assert launch.local_rank() == 0
    monkeypatch.setenv("PMI_RANK", "5")
    assert launch.local_rank() == 5


def test_a_mistake_on_one_rank_is_every_ranks_error():
    def on_rank(t):
        def make():
            if t.rank == 1:
                raise OSError("disk on fire")
            return 5

        with pytest.raises(ValueError, match="rank 1 of 2: disk on fire"):
            agreement.make_on_all(t, make)
        return agreement.make_on_all(t, lambda: t.rank + 5)

    assert transport.run_local(2, on_rank) == [5, 6]


def test_demo_under_mpirun():
    options = ("--data", DATA, "--warmup", 1, "--iterations", 2)
    done = ranks.mpirun(4, SCRIPT, "demo", *options)
    ranks.passed(done)
    assert done.stdout.count("OK: 0 wrong") == 1
    assert "4 ranks on 1 host, transport mpi" in done.stdout
    assert "\x1b" not in done.stdout


def test_bench_under_mpirun(tmp_path):
    options = (*TINY, "--tokens", "1", "--skew", "1.0", "--wire", "mxfp4")
    also = ("--also", "round_trip", "--json", tmp_path / "out.json")
    done = ranks.mpirun(4, SCRIPT, "bench", *options, *also)
    ranks.passed(done)
    assert done.stdout.count("# wrong rows: 0 OK") == 1
    first, second = json.loads((tmp_path / "out.json").read_text())
    assert (first["tokens"], second["tokens"]) == ([24] * 4, [1] * 4)
    of_wire = ["dispatch", "combine", "round_trip"]
    for content in (first, second):
        assert (content["ranks"], content["hosts"], content["wrong_rows"]) == (4, 1, 0)
        assert content["transport"].startswith("mpi (Open MPI")
        assert [row["op"] for row in content["rows"]] == ["plain", *of_wire]
        assert all(row["num_checked"] > 0 and row["num_wrong"] == 0 for row in content["rows"])
        assert all(row["time"]["median_us"] > 0 and row["busbw_gbs"] > 0 for row in content["rows"])


@pytest.mark.parametrize(
    "names", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")], ids=["", "srun"]
)
def test_bench_under_torch(names):
    options = ("bench", *TINY, "--wire", "mxfp4")
    first, second = ranks.torch_ranks(2, SCRIPT, *options, names=names)
    ranks.passed(first, second)
    assert "transport torch (gloo)" in first.stdout
    assert "# wrong rows" not in second.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--hidden", "100"], "hidden: expected a multiple of 32"),
        (["--hiden", "96"], "No such option"),
    ],
)
def test_under_mpirun_one_rank_tells_and_none_hangs(arguments, text):
    done = ranks.mpirun(2, SCRIPT, "bench", *TINY, *arguments)
    assert done.returncode == 2, done.stdout
    assert text in done.stdout
    assert done.stdout.count("Error: ") == 1, done.stdout


LATE = """
import os, time
from fp4comm import cli
def late(options):
    if os.environ["{variable}"] == "0":
        time.sleep(15)
    return options
{wrapped}
cli.main()
"""


def test_if_rank_0_is_late_another_tells(tmp_path):
    script = tmp_path / "late.py"
    comparable = "comparable = cli.comparable\ncli.comparable = lambda o: comparable(late(o))"
    script.write_text(LATE.format(variable="OMPI_COMM_WORLD_RANK", wrapped=comparable))
    done = ranks.mpirun(3, script, "bench", *TINY, "--timeout-s", "1")
    assert done.returncode == 2, ranks.report(done)
    text = r"Error: rank [12] of 3: arguments: no answer from rank 0 within 1\.0 s"
    assert re.search(text, done.stdout), ranks.report(done)


def test_if_rank_0_is_late_to_open_another_tells(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(LATE.format(variable="RANK", wrapped="late(None)"))
    runs = ranks.torch_ranks(2, script, "bench", *TINY, "--timeout-s", "3")
    assert runs[1].returncode == 2, ranks.report(*runs)
    assert "Error: rank 1 of 2: open: " in runs[1].stdout, ranks.report(*runs)


def test_another_size_on_one_rank_is_no_wrong_row(tmp_path):
    script = tmp_path / "bench.py"
    script.write_text(
        "import os, sys\n"
        "from fp4comm.cli import main\n"
        "sys.argv += ['--tokens', str(8 + int(os.environ['OMPI_COMM_WORLD_RANK']))]\n"
        "main()\n"
    )
    done = ranks.mpirun(2, script, "bench", "--hidden", "64", "--experts", "4", "--topk", "2")
    assert done.returncode == 2, done.stdout
    text = "Error: rank 1 of 2: tokens: expected 8 as on rank 0, got 9"
    assert done.stdout.count("Error: ") == done.stdout.count(text) == 1, done.stdout


def test_another_command_on_one_rank_is_named(tmp_path):
    script = tmp_path / "other.py"
    script.write_text(
        "import os, sys\n"
        "from fp4comm.cli import main\n"
        "sys.argv += [['demo'], ['bench', '--calibrate', 'x.toml']]"
        "[int(os.environ['OMPI_COMM_WORLD_RANK'])]\n"
        "main()\n"
    )
    done = ranks.mpirun(2, script)
    assert done.returncode == 2, done.stdout
    text = "Error: rank 1 of 2: command: expected demo as on rank 0, got bench --calibrate"
    assert done.stdout.count("Error: ") == done.stdout.count(text) == 1, done.stdout


def test_another_file_on_one_rank_is_named(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        np.save(tmp_path / str(rank) / "topk.npy", np.full((3, 2), rank))

    def on_rank(t):
        file = tmp_path / str(t.rank) / "topk.npy"
        same = [("seed", 3), ("tokens", ("8",)), ("json_file", t.rank), ("link_gbs", t.rank)]
        in_another_order = dict(same[:: 1 - 2 * t.rank])
        agreement.same_on_all(t, comparable(in_another_order))
        agreement.same_on_all(t, comparable({**in_another_order, "routing": file}))

    with pytest.raises(ValueError, match="rank 1 of 2: routing: expected a file with CRC-32"):
        transport.run_local(2, on_rank)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "4"], "ranks: expected none under a launcher, got 4"),
        (["--transport", "local"], '"local" runs in one process, but this is one of 2'),
    ],
)
def test_the_launcher_starts_the_ranks(monkeypatch, arguments, text):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    result = run("bench", *TINY, *arguments)
    assert result.exit_code == 2
    assert text in result.output


@pytest.mark.parametrize(
    ("size", "rank"),
    [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")],
)
def test_a_launcher_of_another_mpi_is_refused(size, rank):  # INS-11
    env = {size: "2", rank: "0"}
    done = ranks.python(SCRIPT, "bench", *TINY, env=env)
    assert done.returncode == 2
    assert done.stdout.startswith('Error: transport "mpi": this process was started as one of 2')
    assert done.stdout.count("\n") == 1
    other = ranks.python(SCRIPT, "bench", *TINY, env=env | {rank: "1"})
    assert (other.returncode, other.stdout) == (2, "")


def test_checks_hold_without_asserts():  # INS-14
    good = [["--wire", "mxfp4"], "# wrong rows: 0 OK", 0]
    cases = [good, *([arguments, text, 2] for arguments, text in BAD)]
    code = f"""
from click.testing import CliRunner
from fp4comm.cli import cli
for arguments, text, code in {cases!r}:
    result = CliRunner().invoke(cli, ["bench", *{TINY!r}, *arguments])
    if result.exit_code != code or text not in result.output:
        print(arguments, result.exit_code, result.output)
"""
    command = [sys.executable, "-O", "-c", code]
    done = subprocess.run(
        command, cwd=ranks.ROOT, capture_output=True, text=True, timeout=ranks.LIMIT_S
    )
    assert (done.returncode, done.stdout) == (0, ""), done


def test_the_console_script_and_the_module_are_the_same(monkeypatch):
    if script := shutil.which("fp4comm", path=str(Path(sys.executable).parent)):
        assert "fp4comm.cli" in Path(script).read_text()
    monkeypatch.setattr(sys, "argv", ["fp4comm", "--version"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("fp4comm.__main__")
    assert ended.value.code == 0
