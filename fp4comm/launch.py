"""Starting ranks for the command line: by mpirun, torchrun or srun, or threads of one process.

With CUDA each rank also gets its GPU, before its transport is opened.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from fp4comm import agreement, codec, transport
from fp4comm.transport import Transport

Result = TypeVar("Result")

MPI_LAUNCHERS = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL")  # start of their variables
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Only srun's job steps have it; a batch script, one process, has SLURM_PROCID and SLURM_NTASKS too.
SLURM_SIZE = "SLURM_STEP_NUM_TASKS"
SLURM_VARIABLES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": SLURM_SIZE}
# srun's come last, since it may start mpirun or torchrun
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")
LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", SLURM_SIZE)
LAST_WORDS_S = 1.0  # launchers end all ranks when one fails: the others let rank 0 print first


class LaunchedRankError(Exception):
    """An error that one rank reports for all.

    Attributes:
        is_reporter: whether this process is the one.
    """

    def __init__(self, error: Exception, is_reporter: bool) -> None:
        """Wrap the error."""
        super().__init__(" ".join(str(error).split()))
        self.is_reporter = is_reporter


def launched_rank() -> int:
    """Rank that the launcher gave this process, to decide who prints; 0 without one."""
    return _variable(RANK_VARIABLES, 0)


def launched_ranks() -> int:
    """Processes that the launcher says it started; 1 without one."""
    return _variable(SIZE_VARIABLES, 1)


def local_rank() -> int:
    """Rank among those of this machine; the rank itself where no launcher says."""
    return _variable(LOCAL_RANK_VARIABLES, launched_rank())


def choose(name: str, device: str = "cpu") -> str:
    """Turn ``"auto"`` into a transport: torch under torchrun, else local without a launcher.

    Under mpirun it is mpi, with CUDA nccl.  Variables of a launcher only tell whether to ask MPI;
    its COMM_WORLD tells the size.  Under srun it is torch where MASTER_ADDR and MASTER_PORT say
    whom to meet, else as under mpirun.
    """
    if name != "auto":
        return name
    if not set(TORCH_VARIABLES) - set(_torch_variables()):
        return "torch"
    by_mpi = any(variable.startswith(MPI_LAUNCHERS) for variable in os.environ)
    if not by_mpi and _variable((SLURM_SIZE,), 1) == 1:
        return "local"
    under_mpi = "nccl" if device == "cuda" else "mpi"
    if launched_ranks() > 1:
        return under_mpi  # and if MPI sees itself alone, opening it tells
    try:
        from mpi4py import MPI
    except Exception:
        return "local"
    return under_mpi if MPI.COMM_WORLD.Get_size() > 1 else "local"


def use_device(kind: str, rank: int) -> None:
    """Make a GPU current in this thread if CUDA is wanted: rank, modulo the GPUs.

    Args:
        kind: ``"cpu"`` or ``"cuda"``.
        rank: among those of this machine.

    Raises:
        RuntimeError: CUDA is wanted and cannot be used here.
    """
    if kind == "cpu":
        return
    lacks = codec.available()["cuda"]
    if lacks is not None:
        raise RuntimeError(f'device: "cuda" cannot be used here: {lacks}')
    torch.cuda.set_device(rank % torch.cuda.device_count())


def run(
    name: str,
    num_ranks: int | None,
    default_ranks: int,
    timeout_s: float,
    fn: Callable[[Transport], Result],
    device: str = "cpu",
) -> tuple[Result, bool]:
    """Run fn on every rank.

    Args:
        name: a transport, or ``"auto"``.
        num_ranks: of the local transport; None takes the default.  Refused under a launcher, which
            has started the ranks already.
        default_ranks: for that.
        timeout_s: how long a rank waits for another.
        fn: takes the transport of its rank.
        device: ``"cpu"``, or ``"cuda"``: each rank then has a current GPU, by its local rank.

    Returns:
        The result, and whether this process is the one that prints.

    Raises:
        LaunchedRankError: a mistake of the user's, or a rank that is late or gone; on all ranks.
    """
    try:
        name = choose(name, device)
        if name == "nccl" and device != "cuda":
            raise ValueError(f'device: expected cuda with transport "nccl", got {device}')
        if name == "local":
            _check_alone()
            num_ranks = default_ranks if num_ranks is None else num_ranks

            def on_thread(group: Transport) -> Result:
                use_device(device, group.rank)
                return fn(group)

            return transport.run_local(num_ranks, on_thread, timeout_s)[0], True
        if num_ranks is not None:
            raise ValueError(f"ranks: expected none under a launcher, got {num_ranks}")
        try:
            use_device(device, local_rank())
        except RuntimeError as error:  # perhaps on this rank alone
            raise LaunchedRankError(error, True) from error
        return _run_launched(name, timeout_s, fn, device)
    except (ValueError, TypeError, RuntimeError, OSError) as error:  # OSError: late, or gone
        raise LaunchedRankError(error, launched_rank() == 0) from error


def _check_alone() -> None:
    if launched_ranks() > 1:
        raise ValueError(
            'transport: "local" runs in one process, but this is one of'
            f' {launched_ranks()} that a launcher started; use "auto"'
        )


def _run_launched(
    name: str, timeout_s: float, fn: Callable[[Transport], Result], device: str
) -> tuple[Result, bool]:
    if name == "torch":
        _start_torch(timeout_s, "nccl" if device == "cuda" else "gloo")
    group = transport.open(name, timeout_s=timeout_s)
    try:
        result = fn(group)
    except Exception as error:
        group.abort(f"{type(error).__name__}: {error}")
        let_rank_0_print(group.rank == 0)
        if isinstance(error, (ValueError, TypeError, RuntimeError, OSError)):
            raise LaunchedRankError(error, group.rank == 0) from error
        raise
    else:
        return result, group.rank == 0
    finally:
        group.close()


def _start_torch(timeout_s: float, backend: str) -> None:
    import torch.distributed as dist

    found = _torch_variables()
    missing = [variable for variable in TORCH_VARIABLES if variable not in found]
    if missing:
        raise RuntimeError(f'transport "torch" needs {", ".join(missing)} set; use torchrun')
    if not dist.is_initialized():
        limit = datetime.timedelta(seconds=min(timeout_s, 1e6))
        rank, num_ranks = int(found["RANK"]), int(found["WORLD_SIZE"])
        dist.init_process_group(backend, timeout=limit, rank=rank, world_size=num_ranks)


def _torch_variables() -> dict[str, str]:
    """What torch.distributed starts with; rank and size are srun's where torchrun gave none."""
    given = {name: name for name in TORCH_VARIABLES if name in os.environ}
    if SLURM_SIZE in os.environ:
        given = SLURM_VARIABLES | given
    return {name: os.environ[of] for name, of in given.items() if of in os.environ}


def let_rank_0_print(is_rank_0: bool) -> None:
    """Wait a little before failing on another rank than 0."""
    if not is_rank_0:
        time.sleep(LAST_WORDS_S)


def agree(group: Transport, make: Callable[[], Result]) -> Result:
    """Make something on every rank; a mistake on one of them is raised on all."""
    made: Result | None = None
    failure: Exception | None = None
    try:
        made = make()
    except OSError as error:
        failure = ValueError(str(error))
    except Exception as error:
        failure = error
    group.phase = "arguments"
    nothing = np.empty((group.num_ranks, 0), np.int64)
    agreement.agree(group, agreement.Fingerprint(agreement.COMMAND), nothing, failure)
    return made  # type: ignore[return-value]  # else agree has raised


def _variable(names: tuple[str, ...], otherwise: int) -> int:
    values = [os.environ[name] for name in names if os.environ.get(name, "").isdigit()]
    return int(values[0]) if values else otherwise
