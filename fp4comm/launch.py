"""Starting ranks for the command line: by mpirun, torchrun or srun, or threads of one process.

With CUDA each rank also gets its GPU, before its transport is opened.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
import torch

from fp4comm import check, codec, transport
from fp4comm.transport import Transport
from fp4comm.transport.mpi import SIZE_VARIABLES

Result = TypeVar("Result")

MPI_LAUNCHERS = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL")  # start of their variables
WHO, WHERE = ("RANK", "WORLD_SIZE"), ("MASTER_ADDR", "MASTER_PORT")
TORCH_VARIABLES = WHO + WHERE
# Only srun's job steps have it; a batch script, one process, has SLURM_PROCID and SLURM_NTASKS too.
SLURM_SIZE = "SLURM_STEP_NUM_TASKS"
SLURM_WHO = ("SLURM_PROCID", SLURM_SIZE)
# In the order of SIZE_VARIABLES.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")
LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)
MOST_RANKS, MOST_PORT = 2**31 - 1, 2**16 - 1
LAST_WORDS_S = 1.0  # launchers end all ranks when one fails: the others let one print first


class UserError(click.ClickException):
    """A mistake of the user's, or a rank that is gone: one line, on one rank; exit code 2.

    Where rank 0 is gone all that miss it tell, and of a rank that does not come ranks 0 and 1.

    Attributes:
        is_reporter: whether this process is the one.
    """

    exit_code = 2

    def __init__(self, error: Exception | str, is_reporter: bool = True) -> None:
        """Say what is wrong."""
        super().__init__(str(error))
        self.is_reporter = is_reporter

    def show(self, file: Any = None) -> None:
        """Print on the rank that reports."""
        if self.is_reporter:
            click.echo(f"Error: {self.message}", err=True, file=file)


def launched_rank() -> int:
    """Rank that the launcher gave this process, to decide who prints; 0 where it is alone."""
    rank = _first_number(_torch_first("RANK", RANK_VARIABLES), 0)
    return rank if launched_ranks() > 1 else 0


def launched_ranks() -> int:
    """Processes that the launcher says it started; 1 without one."""
    return _first_number(_torch_first("WORLD_SIZE", SIZE_VARIABLES), 1)


def local_rank() -> int:
    """Rank among those of this machine; the rank itself where no launcher says."""
    return _first_number((*LOCAL_RANK_VARIABLES, *_torch_first("RANK", RANK_VARIABLES)), 0)


def choose(name: str, device: str = "cpu") -> str:
    """Turn ``"auto"`` into a transport: torch under torchrun, else local without a launcher.

    Under mpirun it is mpi, with CUDA nccl.  Variables of a launcher only tell whether to ask MPI;
    its COMM_WORLD tells the size.  Under srun it is torch where MASTER_ADDR and MASTER_PORT say
    whom to meet, else as under mpirun.  Some of torch's variables without the others are torch,
    which names those that it lacks.
    """
    if name != "auto":
        return name
    who = _rank_variables()
    num_who, num_where = len(_set_values(who)), len(_set_values(WHERE))
    if num_who + num_where == len(TORCH_VARIABLES):
        return "torch"
    by_mpi = any(variable.startswith(MPI_LAUNCHERS) for variable in os.environ)
    without_where = num_who == 2 and num_where == 0 and who == SLURM_WHO
    if num_who and not by_mpi and not without_where:
        return "torch"
    if not by_mpi and _first_number((SLURM_SIZE,), 1) == 1:
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
        UserError: a mistake of the user's, or a rank that is late or gone, on all ranks; a
            wrong variable of a launcher, or no GPU, on the rank that has it.
    """
    try:
        name = _choose_and_check(name, device)
    except ValueError as error:  # perhaps on this rank alone
        raise _in_one_line(error, True) from error
    try:
        if name == "nccl" and device != "cuda":
            raise ValueError(f'device: expected cuda with transport "nccl", got {device}')
        if name == "local":
            _check_alone()
            num_ranks = default_ranks if num_ranks is None else num_ranks
            check.positive_int("ranks", num_ranks)

            def on_thread(group: Transport) -> Result:
                use_device(device, group.rank)
                return fn(group)

            return transport.run_local(num_ranks, on_thread, timeout_s)[0], True
        if num_ranks is not None:
            raise ValueError(f"ranks: expected none under a launcher, got {num_ranks}")
        try:
            use_device(device, local_rank())
        except RuntimeError as error:  # perhaps on this rank alone
            raise _in_one_line(error, True) from error
        return _run_launched(name, timeout_s, fn, device)
    except OSError as error:  # a rank did not come to open the transport; perhaps rank 0
        reports = launched_rank() < 2
        let_reporter_print(reports)
        raise _in_one_line(error, reports) from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise _in_one_line(error, launched_rank() == 0) from error


def _in_one_line(error: Exception, is_reporter: bool) -> UserError:
    return UserError(" ".join(str(error).split()), is_reporter)


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
        reports = group.rank == 0 or 0 in getattr(error, "peers", ())  # if it is late or gone
        let_reporter_print(reports)
        if isinstance(error, (ValueError, TypeError, RuntimeError, OSError)):
            raise _in_one_line(error, reports) from error
        raise
    else:
        return result, group.rank == 0
    finally:
        group.close()


def _start_torch(timeout_s: float, backend: str) -> None:
    import torch.distributed as dist

    rank, num_ranks = _torch_world()
    if not dist.is_initialized():
        limit = datetime.timedelta(seconds=min(timeout_s, 1e6))
        try:
            dist.init_process_group(backend, timeout=limit, rank=rank, world_size=num_ranks)
        except dist.DistError as error:
            reason = str(error).partition("\n")[0]
            raise ConnectionError(f"rank {rank} of {num_ranks}: open: {reason}") from error


def _choose_and_check(name: str, device: str) -> str:
    """Choose a transport, and check the variables that its ranks are started by."""
    for variable in (*RANK_VARIABLES, *LOCAL_RANK_VARIABLES, *SIZE_VARIABLES):
        if os.environ.get(variable):
            _checked_number(variable, 0, MOST_RANKS)
    name = choose(name, device)
    if name == "torch":
        _torch_world()
    return name


def _torch_world() -> tuple[int, int]:
    """Return the rank and the number of ranks that torch.distributed starts with."""
    who = _rank_variables()
    missing = [variable for variable in (*who, *WHERE) if not os.environ.get(variable)]
    if missing:
        raise ValueError(
            f'{", ".join(missing)}: expected to be set for transport "torch", as torchrun sets'
            f" {', '.join(TORCH_VARIABLES)}, got none"
        )
    of_rank, of_size = who
    _checked_number("MASTER_PORT", 1, MOST_PORT)
    num_ranks = _checked_number(of_size, 1, MOST_RANKS)
    return _checked_number(of_rank, 0, num_ranks - 1), num_ranks


def _rank_variables() -> tuple[str, str]:
    """Name the variables of rank and size: srun's where torchrun gave neither."""
    return SLURM_WHO if os.environ.get(SLURM_SIZE) and not _set_values(WHO) else WHO


def let_reporter_print(is_reporter: bool) -> None:
    """Wait a little before failing on another rank than the one that reports."""
    if not is_reporter:
        time.sleep(LAST_WORDS_S)


def _checked_number(variable: str, low: int, high: int) -> int:
    text = os.environ[variable]
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ValueError(f"{variable}: expected a whole number in {low}..{high}, got {text!r}")
    return int(text)


def _set_values(names: Sequence[str]) -> list[str]:
    """What these variables hold that are set."""
    return [os.environ[name] for name in names if os.environ.get(name)]


def _torch_first(of_torch: str, names: Sequence[str]) -> Sequence[str]:
    """Variables in the order in which they count: torchrun's first where it set all of its own."""
    is_torchs = len(_set_values(TORCH_VARIABLES)) == len(TORCH_VARIABLES)
    return (of_torch, *names) if is_torchs else names


def _first_number(names: Sequence[str], otherwise: int) -> int:
    """The first that holds a number."""
    return next((int(text) for text in _set_values(names) if text.isdecimal()), otherwise)
