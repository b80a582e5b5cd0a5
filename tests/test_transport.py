"""Transports: every row in its place, and every failure an error in time on every rank.

The cases are in mpi/transport_cases.py; they run on threads ("local"), under mpirun, and in
torch.distributed processes.  Ids such as COM-07 are those of the reports that a case comes from.
What needs a GPU is in gpu/nccl_cases.py.
"""

import dataclasses
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import ranks
import torch

from fp4comm import transport
from fp4comm.transport import _nccl_ranks, mpi
from fp4comm.transport.local import LocalTransport

sys.path.insert(0, str(ranks.SCRIPTS))
import transport_cases as cases  # noqa: E402

MOVING = ["splits", "large", "counts", "rounds"]
ALL_MOVING = [*MOVING, "arguments", "async_op", "stream", "ahead", "call_numbers"]
STOPPING = ["stall=counts", "stall=exchange", "stall_named", "abort=counts", "abort=exchange"]
STOPPING += ["with_error", "close"]
DISAGREEING = ["disagree", "disagree_large", "other_call", "other_k"]


def run_local(num_ranks, case):
    name, _, argument = case.partition("=")
    arguments = [argument] if argument else []
    transport.run_local(num_ranks, lambda t: getattr(cases, f"case_{name}")(t, *arguments), 20.0)


def assert_said_ok(runs, names, ranks_alive):
    """Assert that each rank passed each case: ``ok CASE rank r`` stands in the output."""
    text = ranks.report(*runs)
    for name in names:
        for rank in ranks_alive:
            assert f"ok {name} rank {rank}" in text, text


def seconds_since_last_word(run):
    """Return how long ago a rank of ``run``, which is over, last said at what time it was."""
    times = [float(line.split(" at ")[1]) for line in run.stdout.splitlines() if " at 1" in line]
    assert times, ranks.report(run)
    return time.time() - max(times)


# ---- bytes


@pytest.mark.parametrize("case", ALL_MOVING)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_local_moves_every_row_to_its_place(num_ranks, case):
    run_local(num_ranks, case)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_mpi_moves_every_row_to_its_place(num_ranks):
    names = MOVING if num_ranks == 8 else ALL_MOVING
    run = ranks.mpirun(num_ranks, "transport_cases.py", "mpi", *names)
    ranks.passed(run)
    assert_said_ok([run], names, range(num_ranks))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_torch_moves_every_row_to_its_place(num_ranks):
    names = MOVING if num_ranks == 8 else ALL_MOVING
    runs = ranks.torch_ranks(num_ranks, "transport_cases.py", "torch", *names)
    ranks.passed(*runs)
    assert_said_ok(runs, names, range(num_ranks))


def test_mpi_takes_any_communicator_and_any_number_of_transports():
    ranks.passed(ranks.mpirun(4, "mpi_groups.py", "subcommunicators", "two_at_once"))
    ranks.passed(ranks.mpirun(2, "mpi_groups.py", "wrong_comm", "recreate"))
    ranks.passed(ranks.mpirun(4, "mpi_groups.py", "no_gpu"))


def test_mpi_passes_2_and_4_gib():
    ranks.passed(ranks.mpirun(2, "mpi_groups.py", "big"))


def test_torch_takes_any_group_and_any_number_of_transports():
    four = ranks.torch_ranks(4, "torch_groups.py", "not_initialized", "subgroups", "two_at_once")
    ranks.passed(*four)
    two = ["not_initialized", "recreate", "other_backend", "no_gpu", "recover", "open_late"]
    ranks.passed(*ranks.torch_ranks(2, "torch_groups.py", *two))


def test_local_with_more_threads_than_cores():
    def on_rank(t):
        for _ in range(20):
            cases.case_counts(t)
        return t.rank

    assert transport.run_local(24, on_rank) == list(range(24))


# ---- failures


@pytest.mark.parametrize("case", STOPPING)
def test_local_tells_of_late_stopped_and_closed_ranks(case):
    run_local(3, case)


@pytest.mark.parametrize("case", DISAGREEING)
def test_local_tells_of_calls_that_disagree(case):
    run_local(2, case)


def test_mpi_tells_of_late_stopped_and_closed_ranks_and_ends_the_job():
    run = ranks.mpirun(3, "transport_cases.py", "mpi", "--failing", *STOPPING)
    assert_said_ok([run], STOPPING, range(3))
    assert run.returncode not in (0, None)


def test_torch_tells_of_late_stopped_and_closed_ranks():
    runs = ranks.torch_ranks(3, "transport_cases.py", "torch", "--failing", *STOPPING)
    assert_said_ok(runs, STOPPING, range(3))
    assert [run.returncode for run in runs] == [3, 3, 3], ranks.report(*runs)


def test_mpi_tells_of_calls_that_disagree():
    names = [*DISAGREEING, "call_behind"]
    run = ranks.mpirun(2, "transport_cases.py", "mpi", "--failing", *names)
    assert_said_ok([run], names, range(2))
    assert run.returncode not in (0, None)


def test_torch_tells_of_calls_that_disagree():
    runs = ranks.torch_ranks(2, "transport_cases.py", "torch", "--failing", *DISAGREEING)
    assert_said_ok(runs, DISAGREEING, range(2))
    assert [run.returncode for run in runs] == [3, 3], ranks.report(*runs)


def test_mpi_death_of_a_rank_ends_the_job():
    """Plain mpirun does that; rank 2 says when, just before."""
    run = ranks.mpirun(3, "transport_cases.py", "mpi", "--failing", "death=exchange")
    assert run.returncode == 9, ranks.report(run)
    assert seconds_since_last_word(run) < 11


@pytest.mark.parametrize("phase", ["counts", "exchange"])
def test_mpi_survivors_of_a_death_raise_under_mpirun_continuous(phase):
    """COM-18."""
    cases = ["--failing", f"death={phase}"]
    run = ranks.mpirun(3, "transport_cases.py", "mpi", *cases, options=["--continuous"])
    assert_said_ok([run], [f"death={phase}"], range(2))
    assert run.returncode not in (0, None)


@pytest.mark.parametrize("phase", ["counts", "exchange"])
def test_torch_survives_the_death_of_a_rank(phase):
    runs = ranks.torch_ranks(3, "transport_cases.py", "torch", "--failing", f"death={phase}")
    assert_said_ok(runs, [f"death={phase}"], range(2))
    assert [run.returncode for run in runs] == [3, 3, 9], ranks.report(*runs)


@pytest.mark.parametrize("case", ["hang", "error"])
def test_mpi_job_ends_though_a_rank_hangs_or_raises(case):
    """COM-20: Finalize would wait for ever; the job ends within 10 s of the error, not with 0."""
    run = ranks.mpirun(3, "transport_cases.py", "mpi", "--failing", case)
    assert run.returncode not in (0, None), ranks.report(run)
    assert seconds_since_last_word(run) < 11
    text = "mistake" if case == "error" else f"ok {case} rank 1"
    assert text in run.stdout, ranks.report(run)


@pytest.mark.parametrize("case", ["recover", "open_late", "no_gpu_and_late"])
def test_mpi_new_transport_after_a_failure(case):
    run = ranks.mpirun(2, "mpi_groups.py", case)
    assert f"ok {case} rank 0" in run.stdout, ranks.report(run)
    assert run.returncode not in (0, None)  # the broken transport ends the job at exit


# ---- run_local


def test_run_local_raises_the_first_error_and_stops_the_others():
    seen = []

    def on_rank(t):
        if t.rank == 1:
            raise KeyError("rank 1 was first")
        try:
            cases.ones_counts(t)
        except RuntimeError as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match="rank 1 was first"):
        transport.run_local(3, on_rank)
    assert seen == ["stopped by rank 1: KeyError: 'rank 1 was first'"] * 2


def test_local_call_whose_rows_are_all_over_is_not_stopped(monkeypatch):
    """Rank 0 fails after a call; rank 1, slow to look whether its rows were read, keeps it."""
    await_reader = LocalTransport._await_reader

    def slow(self, peer, mine, call):
        if self.rank == 1:
            with self._world.changed:
                assert self._world.changed.wait_for(lambda: self._world.stop, 20)
        await_reader(self, peer, mine, call)

    monkeypatch.setattr(LocalTransport, "_await_reader", slow)

    def on_rank(t):
        came = cases.ones_counts(t)
        if t.rank == 0:
            t.abort("later")
        else:
            with pytest.raises(RuntimeError, match="stopped by rank 0: later"):
                cases.ones_counts(t)
        return came

    for came in transport.run_local(2, on_rank):
        assert (came == 1).all()


def test_run_local_leaves_a_hanging_rank_behind(monkeypatch):
    monkeypatch.setattr("fp4comm.transport.local.AFTER_FAILURE_S", 0.2)
    hang = threading.Event()

    def on_rank(t):
        return hang.wait(30) if t.rank == 1 else cases.ones_counts(t)

    start = time.monotonic()
    with pytest.raises(TimeoutError, match="rank 0 of 2: counts: no answer from rank 1 within"):
        transport.run_local(2, on_rank, timeout_s=0.2)
    assert time.monotonic() - start < 10
    hang.set()


def test_run_local_needs_a_rank():
    with pytest.raises(ValueError, match="num_ranks: expected at least 1, got 0"):
        transport.run_local(0, lambda t: None)
    with pytest.raises(ValueError, match="timeout_s: expected more than 0 seconds, got 0"):
        transport.run_local(1, lambda t: None, timeout_s=0)


def test_local_peer_that_disagrees_on_nothing_is_told_too():
    """Rank 0 has rows for rank 1, which expects none and has left the call: both hear of it."""
    rows = np.zeros((2, 4), np.uint8)
    none = rows[:0]

    def on_rank(t):
        t.timeout_s = 3.0
        text = "rank 0 sends 2 rows to rank 1, which expects 0"
        with cases.raises(ValueError, text):
            if t.rank == 0:
                t.exchange([rows], [0, 2], [none], [0, 0])
            else:
                t.exchange([none], [0, 0], [none], [0, 0])
                cases.ones_counts(t)

    transport.run_local(2, on_rank)


# ---- open, install


def test_open_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="name: expected one of local, mpi, nccl, torch, got 'ib'"):
        transport.open("ib")
    text = 'comm: belongs to transports "mpi" and "nccl", used with "local"'
    with pytest.raises(ValueError, match=text):
        transport.open("local", comm=object())
    with pytest.raises(ValueError, match='group: belongs to transport "torch", used with "mpi"'):
        transport.open("mpi", group=object())


def test_open_local_is_one_rank_and_closes_twice():
    with transport.open("local") as t:
        assert (t.name, t.rank, t.num_ranks, t.timeout_s) == ("local", 0, 1, 300.0)
        cases.case_splits(t)
    t.close()
    with pytest.raises(RuntimeError, match='transport "local": closed'):
        cases.one_each(t)


def python(code, **env):
    """Run ``code`` in a new interpreter and return what it prints."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=ranks._environment() | env,
        capture_output=True,
        text=True,
        timeout=ranks.LIMIT_S,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def fake_mpi4py(tmp_path, code):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text(textwrap.dedent(code))
    return {"PYTHONPATH": f"{tmp_path}:{ranks.ROOT}"}


OPEN_MPI = """
    from fp4comm import transport
    print(transport.available()["mpi"])
    try:
        transport.open("mpi")
    except RuntimeError as error:
        print(error)
    print(transport.open("local").num_ranks)
"""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param("RuntimeError", "cannot load MPI library", id="INS-09"),
        pytest.param("ImportError", "libmpi.so.12: cannot open shared object file", id="INS-10"),
        pytest.param("OSError", "libmpi.so.40: undefined symbol", id="OSError"),
        pytest.param("ModuleNotFoundError", "No module named 'mpi4py'", id="not installed"),
    ],
)
def test_missing_mpi_says_what_to_install_and_why(tmp_path, error, text):
    env = fake_mpi4py(tmp_path, f"raise {error}({text!r})")
    said = python(OPEN_MPI, **env).splitlines()
    want = f'transport "mpi" needs mpi4py and an MPI library ({error}: {text}); '
    want += "pip install 'fp4comm[mpi]'"
    assert said == [want, want, "1"]


@pytest.mark.parametrize("name", mpi.SIZE_VARIABLES)
def test_wrong_launcher_is_an_error(name):
    """INS-11: the real MPI, alone, though the environment says that there are two."""
    said = python(OPEN_MPI, **{name: "2"}).splitlines()
    assert said[0] == "None"
    assert f"started as one of 2 ({name}), but its MPI sees itself alone" in said[1]
    assert "the launcher belongs to another MPI" in said[1]


def test_mpi_without_mpirun_is_one_rank():
    said = python("from fp4comm import transport; t = transport.open('mpi'); print(t.num_ranks)")
    assert said.strip() == "1"


def test_available_names_every_transport():
    found = transport.available()
    assert list(found) == list(transport.NAMES)
    assert found["local"] is None
    assert found["torch"] is None
    assert found["nccl"] is None or found["nccl"].startswith('transport "nccl" needs ')


# ---- what NCCL needs


HAS_ALL = _nccl_ranks.Presence("", 23000, "GPU 0", may_share=False)


def error_of_all_ranks(presences):
    """Compare ``presences``, one a rank, and return the error that all ranks raise, if any."""

    def on_rank(t):
        try:
            _nccl_ranks.check_ranks(t, presences[t.rank])
        except RuntimeError as error:
            cases.case_counts(t)  # the transport is as it was
            return str(error)
        return None

    errors = transport.run_local(len(presences), on_rank, 20.0)
    assert len({*errors}) == 1, errors
    return errors[0]


def on_gpus(*devices, **of_all):
    return [dataclasses.replace(HAS_ALL, device=f"GPU {d}", **of_all) for d in devices]


def test_all_ranks_name_the_one_that_lacks_something():
    presences = on_gpus(0, 1, 2)
    presences[1] = _nccl_ranks.Presence("needs CuPy (ImportError: no)", 0, "", may_share=False)
    text = 'rank 1 of 3: transport "local" needs CuPy (ImportError: no)'
    assert error_of_all_ranks(presences) == text
    presences[1] = dataclasses.replace(presences[1], missing="needs " + "\u20ac" * 600)
    assert error_of_all_ranks(presences).startswith('rank 1 of 3: transport "local" needs \u20ac')
    assert error_of_all_ranks(on_gpus(0, 1, 2)) is None


def test_all_ranks_name_the_two_on_one_gpu():
    """COM-29."""
    text = error_of_all_ranks(on_gpus(0, 1, 0, version=22809))
    assert text.startswith("rank 2 of 3: device: expected one for each rank, got GPU 0 for ranks 0")
    assert "NCCL 2.30.0 or newer (found 2.28.9) and NCCL_MULTI_RANK_GPU_ENABLE=1" in text
    assert error_of_all_ranks(on_gpus(0, 0, 0, may_share=True)) is None
    presences = on_gpus(0, 0, 0, may_share=True)
    presences[1] = HAS_ALL
    assert "for ranks 0 and 1" in error_of_all_ranks(presences)


def test_all_ranks_name_the_one_with_another_nccl():
    presences = [*on_gpus(0, 1), dataclasses.replace(HAS_ALL, device="GPU 2", version=22708)]
    text = "rank 2 of 3: NCCL: expected 2.30.0 as on rank 0, found 2.27.8"
    assert error_of_all_ranks(presences) == text


def test_all_ranks_raise_if_rank_0_gets_no_id():
    """COM-30: what stands for NCCL here has no such function."""

    def on_rank(t):
        with cases.raises(RuntimeError, "rank 0 of 3: NCCL: no id for a communicator: "):
            _nccl_ranks.share_id(t, None)
        cases.case_counts(t)

    transport.run_local(3, on_rank, 20.0)


IMPORT_NCCL = """
    from fp4comm.transport import _nccl_ranks
    try:
        print(_nccl_ranks.import_nccl().get_version())
    except RuntimeError as error:
        print(error)
"""


def test_missing_cupy_says_what_to_install(tmp_path):
    """INS-03."""
    (tmp_path / "cupy.py").write_text("raise ImportError('libcuda.so.1 is not there')")
    said = python(IMPORT_NCCL, PYTHONPATH=f"{tmp_path}:{ranks.ROOT}")
    want = (
        r"needs CuPy \(ImportError: libcuda.so.1 is not there\); pip install 'fp4comm\[cuda1[23]\]'"
    )
    assert re.fullmatch(want, said.strip()), said


def library_without_symbols(tmp_path, code):
    """Build a libnccl.so.2 of ``code`` alone and return the environment in which it is found."""
    pytest.importorskip("cupy")
    if shutil.which("cc") is None or torch.version.cuda is not None:
        pytest.skip("needs a C compiler, and a torch that needs no NCCL itself")
    source = tmp_path / "nccl.c"
    source.write_text(code)
    library = tmp_path / "libnccl.so.2"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, source]
    subprocess.run(command, check=True)
    return {"LD_LIBRARY_PATH": str(tmp_path), "LD_PRELOAD": str(library)}


def test_old_nccl_is_named_with_the_version_that_is_needed(tmp_path):
    """INS-06: CuPy's bindings do not load, since a symbol is missing."""
    code = "int ncclGetVersion(int* version) { *version = 21210; return 0; }"
    said = python(IMPORT_NCCL, **library_without_symbols(tmp_path, code))
    want = r"needs NCCL 2.18.0 or newer, found 2.12.10; pip install 'fp4comm\[cuda1[23]\]'"
    assert re.fullmatch(want, said.strip()), said


def test_missing_nccl_says_what_to_install(tmp_path):
    """INS-04: there is one of that name, which is none."""
    said = python(IMPORT_NCCL, **library_without_symbols(tmp_path, ""))
    want = r"needs libnccl \(.*undefined symbol: nccl.*\); pip install 'fp4comm\[cuda1[23]\]'"
    assert re.fullmatch(want, said.strip()), said
