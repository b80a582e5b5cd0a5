"""What all tests have in common."""

import os

import pytest
import torch

from fp4comm import launch
from fp4comm.transport.local import LocalTransport


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    """Tests may themselves run under a launcher."""
    of_launcher = (
        *launch.TORCH_VARIABLES,
        *launch.RANK_VARIABLES,
        *launch.LOCAL_RANK_VARIABLES,
        *launch.SIZE_VARIABLES,
    )
    for name in list(os.environ):
        if name.startswith(launch.MPI_LAUNCHERS) or name in of_launcher:
            monkeypatch.delenv(name)


@pytest.fixture
def one_wrong_byte(monkeypatch):
    """Change a byte of what arrives at rank 1 in each exchange of the local transport."""
    move = LocalTransport._move

    def corrupting(self, call):
        move(self, call)
        if call.shape.kind == "exchange" and self.rank == 1:
            call.recvs[0][5, 7] ^= 1

    monkeypatch.setattr(LocalTransport, "_move", corrupting)


@pytest.fixture
def one_thread():
    """Let torch's products on several ranks not wait for each other's threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
