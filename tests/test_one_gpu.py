"""benchmarks/one_gpu.py as far as it goes without a GPU: what it refuses, starts and stops."""

import contextlib
import json
import lzma
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks

sys.path.insert(0, str(ranks.ROOT / "benchmarks"))

import one_gpu

BENCHMARKS = ranks.ROOT / "benchmarks"

TELL = """
import json, os
parent = open(f"/proc/{os.getppid()}/environ").read().split(chr(0))
names = ("NCCL_HOSTID", "LD_PRELOAD", "NCCL_MULTI_RANK_GPU_ENABLE", "CUDA_VISIBLE_DEVICES",
         "CUDA_MPS_PIPE_DIRECTORY")
told = {name: os.environ.get(name) for name in names}
told["launcher preloads"] = any(line.startswith("LD_PRELOAD=") for line in parent)
told["rank"] = int(os.environ["OMPI_COMM_WORLD_RANK"])
print("told", json.dumps(told), flush=True)
"""


@pytest.mark.parametrize("folder", ["with space", "with:colon"])
def test_a_path_that_preloading_would_split_is_refused(folder):
    with pytest.raises(one_gpu.SetupError, match="without spaces and colons, got") as raised:
        one_gpu.rank_command(2, 1, Path(folder) / "libnccl.so.2", ["true"], None)
    assert folder in raised.value.message


def test_a_relative_path_of_nccl_is_made_absolute(tmp_path, monkeypatch):
    (tmp_path / "libnccl.so.2").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(one_gpu, "nccl_version", lambda library: (2, 32, 3))
    for given in (".", "libnccl.so.2"):
        assert one_gpu.find_nccl(Path(given), tmp_path) == (tmp_path / "libnccl.so.2").resolve()


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start the script as on a machine that has all it needs; its MPS writes down its calls."""
    fake = tmp_path / "bin" / one_gpu.MPS
    fake.parent.mkdir()
    log = tmp_path / "mps.log"
    fake.write_text(
        f'#!/bin/sh\n[ "$1" = -d ] && echo "start $CUDA_VISIBLE_DEVICES" >> {log} || cat >> {log}\n'
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import one_gpu\n"
        "from pathlib import Path\n"
        "one_gpu.check_gpu = lambda: None\n"
        "one_gpu.find_nccl = lambda given, scratch: Path('libm.so.6')\n"
        "one_gpu.nccl_version = lambda library: (2, 32, 3)\n"
        "one_gpu.main()\n"
    )
    path = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
    started = []

    def run(*arguments, **environment):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=os.environ | {"PATH": path, "TMPDIR": str(scratch)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield run, log, scratch
    for process in started:
        process.kill()
        process.wait()


def finish(process):
    output, _ = process.communicate(timeout=ranks.LIMIT_S)
    return process.returncode, output


def test_each_virtual_node_has_a_name_and_only_ranks_load_nccl(start):
    run, log, scratch = start
    command = ("-n", 4, "--nodes", 2, "--", sys.executable, "-c", TELL)
    code, output = finish(run(*command, CUDA_VISIBLE_DEVICES="5,7", LD_PRELOAD="libdl.so.2"))
    assert code == 0, output
    assert "# 4 ranks on GPU 5, 2 virtual nodes, NCCL 2.32.3" in output
    told = [json.loads(line[5:]) for line in output.splitlines() if line.startswith("told ")]
    told = sorted(told, key=lambda rank: rank["rank"])
    assert [rank["NCCL_HOSTID"] for rank in told] == ["node0", "node0", "node1", "node1"]
    for rank in told:
        assert rank["LD_PRELOAD"] == "libm.so.6:libdl.so.2"
        assert rank["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert rank["CUDA_VISIBLE_DEVICES"] == "0"  # of those that MPS was started with
        assert rank["CUDA_MPS_PIPE_DIRECTORY"].startswith(str(scratch))
        assert not rank["launcher preloads"]
    assert log.read_text() == "start 5\nquit\n"
    assert not list(scratch.glob("one_gpu_*"))


def test_without_mps_ranks_take_turns_on_the_chosen_gpu(start):
    run, log, _ = start
    process = run("-n", 1, "--no-mps", sys.executable, "-c", TELL, CUDA_VISIBLE_DEVICES="3")
    code, output = finish(process)
    assert code == 0, output
    assert "without MPS" in output
    told = json.loads(next(line[5:] for line in output.splitlines() if line.startswith("told ")))
    assert told["CUDA_VISIBLE_DEVICES"] == "3"
    assert told["CUDA_MPS_PIPE_DIRECTORY"] is None
    assert not log.exists()


def test_the_exit_code_of_the_program_is_passed_on(start):
    run, log, _ = start
    code, _ = finish(run("-n", 2, sys.executable, "-c", "raise SystemExit(7)"))
    assert code == 7
    assert log.read_text().endswith("quit\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_mps_and_ranks_are_stopped_with_it(start, number, tmp_path):
    run, log, scratch = start
    pids = tmp_path / "pids"
    code = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(60)"
    process = run("-n", 2, sys.executable, "-c", code)
    deadline = time.monotonic() + ranks.LIMIT_S
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert finish(process)[0] == 128 + number
    assert log.read_text().endswith("quit\n")
    assert not list(scratch.glob("one_gpu_*"))
    for pid in pids.read_text().split():
        assert is_gone(int(pid))


def is_gone(pid):
    for _ in range(600):
        with contextlib.suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.1)
                continue
        return True
    return False


def alone(*arguments):
    return ranks.python(BENCHMARKS / "one_gpu.py", *arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "8", "--nodes", "3", "true"], "nodes: expected a divisor of 8 ranks, got 3"),
        (["-n", "0", "true"], "Invalid value for '-n'"),
        (["-n", "2", "--nccl", "nowhere", "true"], "Path 'nowhere' does not exist"),
        (["-n", "2"], "Missing argument 'COMMAND...'"),
    ],
)
def test_wrong_arguments_end_with_2(arguments, text):
    done = alone(*arguments)
    assert done.returncode == 2
    assert text in done.stdout


def test_without_a_gpu_it_says_so():
    done = ranks.python(
        BENCHMARKS / "one_gpu.py", "-n", 2, "true", env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 2
    assert done.stdout.startswith("Error: GPU: expected an NVIDIA GPU, got no")
    assert done.stdout.count("\n") == 1


def test_without_mps_it_names_the_way_around(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(one_gpu.SetupError, match=r"nvidia-cuda-mps-control: not found.*--no-mps"):
        one_gpu.check_mps()


def test_without_mpirun_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(one_gpu.SetupError, match="mpirun: expected Open MPI's, got none; pip"):
        one_gpu.mpirun()


def test_an_mps_that_does_not_start_is_an_error(start, tmp_path):
    run, _, scratch = start
    fake = tmp_path / "bin" / one_gpu.MPS
    fake.write_text("#!/bin/sh\necho 'another one is running'\nexit 1\n")
    code, output = finish(run("-n", 1, "true"))
    assert code == 2
    assert f"{one_gpu.MPS}: could not be started (another one is running)" in output
    assert not list(scratch.glob("one_gpu_*"))


# NCCL


def test_nccl_is_found_in_a_folder_and_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(one_gpu, "nccl_version", lambda library: (2, 30, 4))
    given, scratch = tmp_path / "given", tmp_path / "scratch"
    given.mkdir()
    scratch.mkdir()
    (given / "libnccl.so.2.xz").write_bytes(lzma.compress(b"code"))
    for path in (given, given / "libnccl.so.2.xz"):
        assert one_gpu.find_nccl(path, scratch).read_bytes() == b"code"
        (scratch / "libnccl.so.2").unlink()
    (given / "libnccl.so.2").write_bytes(b"plain")
    assert one_gpu.find_nccl(given, scratch) == given / "libnccl.so.2"


def test_an_nccl_that_is_too_old_is_named_with_what_is_needed(tmp_path, monkeypatch):  # INS-06
    monkeypatch.setattr(one_gpu, "nccl_version", lambda library: (2, 28, 9))
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"")
    with pytest.raises(one_gpu.SetupError, match=r"expected 2\.30 or newer .*, got 2\.28\.9 in"):
        one_gpu.find_nccl(library, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("libnccl.so.2", b"no library", "nccl: expected NVIDIA's library, got"),
        ("libnccl.so.2.xz", b"not packed", "nccl: expected a file packed by xz, got"),
        ("readme", b"", "or a folder with one, got"),
    ],
)
def test_what_is_no_nccl_is_refused(tmp_path, name, content, text):
    (tmp_path / name).write_bytes(content)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(one_gpu.SetupError, match=text):
        one_gpu.find_nccl(tmp_path, scratch)


def test_an_installed_wheel_is_taken_if_it_is_new_enough(tmp_path, monkeypatch):
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    info = tmp_path / "nvidia_nccl_cu13-2.30.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(one_gpu, "nccl_version", lambda library: (2, 30, 4))
    assert one_gpu.find_nccl(None, tmp_path) == library
    monkeypatch.setattr(one_gpu, "nccl_version", lambda library: (2, 27, 3))
    with pytest.raises(one_gpu.SetupError, match=r"got 2\.27\.3 among the installed wheels"):
        one_gpu.find_nccl(None, tmp_path)
