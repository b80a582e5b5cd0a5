"""Rounds, gradients, expert layers and the two-hop route on real processes: mpi/cases.py.

What a number of ranks is for comes in one start, since starting takes longest.
"""

import pytest
import ranks


@pytest.mark.parametrize(
    ("num_ranks", "checks"),
    [
        (1, ["rounds"]),
        (2, ["rounds", "layers"]),
        (3, ["rounds", "gradients"]),
        (4, ["rounds", "two_hops"]),
        (8, ["rounds"]),
    ],
)
def test_under_mpirun(num_ranks, checks):
    run = ranks.mpirun(num_ranks, "cases.py", "mpi", *checks)
    ranks.passed(run)
    for check in checks:
        assert run.stdout.count(f"{check} right") == num_ranks, ranks.report(run)


@pytest.mark.parametrize(
    ("num_ranks", "checks"),
    [(1, ["rounds"]), (2, ["rounds", "gradients"]), (4, ["rounds", "two_hops"])],
)
def test_on_torch_distributed(num_ranks, checks):
    runs = ranks.torch_ranks(num_ranks, "cases.py", "torch", *checks)
    ranks.passed(*runs)
    for check in checks:
        assert all(f"{check} right" in run.stdout for run in runs), ranks.report(*runs)
