"""A stalled, failing or dead rank at each point of a round, on each transport."""

import re
import sys

import pytest
import ranks

from fp4comm import transport

sys.path.insert(0, str(ranks.SCRIPTS))
import failures

WHERE = ["counts", "exchange", "combine"]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("how", ["stall", "raise"])
def test_on_threads(how, where):
    transport.run_local(3, lambda t: failures.on_rank(t, how, where), timeout_s=30)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("how", ["stall", "raise", "die"])
def test_on_torch_distributed(how, where):
    runs = ranks.torch_ranks(3, "failures.py", "torch", how, where)
    assert [run.returncode for run in runs] == [0, 0, 7 if how == "die" else 0], ranks.report(*runs)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("how", ["stall", "raise", "die"])
def test_under_mpirun(how, where):
    """The job ends, with an exit code that is not 0 where a message may still be under way."""
    options = ["--continuous"] if how == "die" else []
    run = ranks.mpirun(3, "failures.py", "mpi", how, where, options=options)
    survivors = re.findall(r"rank (\d) survived", run.stdout)
    assert sorted(survivors) == ["0", "1"], ranks.report(run)
    if how != "raise":
        assert run.returncode != 0, ranks.report(run)


@pytest.mark.parametrize("where", ["counts", "combine"])
def test_a_rank_that_leaves_is_noticed_at_once_under_mpirun(where):
    """sys.exit, with the transport open: peers need not wait for the time limit."""
    run = ranks.mpirun(3, "failures.py", "mpi", "leave", where)
    survivors = re.findall(r"rank (\d) survived", run.stdout)
    assert survivors, ranks.report(run)
    assert run.returncode != 0, ranks.report(run)


@pytest.mark.parametrize("where", WHERE)
def test_a_death_ends_the_job_under_plain_mpirun(where):
    run = ranks.mpirun(3, "failures.py", "mpi", "die", where)
    assert run.returncode == 7, ranks.report(run)
