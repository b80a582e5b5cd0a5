"""What all tests have in common."""

import os

import pytest
import torch

from fp4comm import launch


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
def one_thread():
    """Let torch's products on several ranks not wait for each other's threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
