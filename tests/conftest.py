"""What all tests have in common."""

import os

import pytest

from fp4comm import launch


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    """Tests may themselves run under a launcher."""
    of_launcher = (*launch.TORCH_VARIABLES, *launch.LOCAL_RANK_VARIABLES)
    for name in list(os.environ):
        if name.startswith(launch.MPI_LAUNCHERS) or name in of_launcher:
            monkeypatch.delenv(name)
