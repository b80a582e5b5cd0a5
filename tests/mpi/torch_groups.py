"""What only torch.distributed has: process groups and their backends.  torch_groups.py CASE..."""

import os
import sys
import time
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from transport_cases import (
    case_counts,
    case_disagree,
    exchange_and_check,
    raises,
    say,
)

from fp4comm import transport


def check_rows(t):
    exchange_and_check(t, np.arange(t.num_ranks**2).reshape(t.num_ranks, -1))


def case_not_initialized():
    with raises(RuntimeError, "init_process_group"):
        transport.open("torch")
    dist.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # INS-20: ranks come from the group
        os.environ.pop(name, None)


def case_subgroups():
    """COM-27: group rank is not global rank, whether or not torch sorts the ranks."""
    world_rank = dist.get_rank()
    for ranks, options in (([1, 3], {}), ([3, 1], {"sort_ranks": False}), ([0, 1, 3], {})):
        group = dist.new_group(ranks, **options)
        if world_rank not in ranks:
            with raises(TypeError, "group: expected a torch.distributed ProcessGroup"):
                transport.open("torch", group=group)
            continue
        with transport.open("torch", group=group, timeout_s=20) as t:
            assert t.rank == ranks.index(world_rank)
            assert t.num_ranks == len(ranks)
            check_rows(t)
    dist.barrier()


def case_two_at_once():
    """Two transports and the caller's own messages on one group do not mix."""
    a, b = transport.open("torch"), transport.open("torch")
    rng = np.random.default_rng(1)
    for t in (a, b, b, a) * 10:
        exchange_and_check(t, rng.integers(0, 9, (t.num_ranks, t.num_ranks)))
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == t.num_ranks
    a.close()
    check_rows(b)
    b.close()


def case_recreate():
    """COM-34: a new transport at each of 6 x 13 sizes; no connection is left."""
    open_files = []
    for _ in range(6):
        for power in range(13):
            with transport.open("torch", timeout_s=20) as t:
                exchange_and_check(t, np.full((t.num_ranks, t.num_ranks), 2**power))
        del t
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert open_files[-1] <= open_files[1], open_files


def case_recover():
    """COM-22: after an error only a new transport works; the caller's group is as it was."""
    t = transport.open("torch", timeout_s=20)
    case_disagree(t)
    dist.barrier()
    if t.rank == 0:
        t.close()  # and rank 1 does not
    with transport.open("torch", timeout_s=20) as t:
        check_rows(t)
        case_counts(t)


def case_open_late():
    if dist.get_rank() == 1:
        time.sleep(2)
        return
    with raises(TimeoutError, "rank 0 of 2: open: not all ranks came within 1.0 s"):
        transport.open("torch", timeout_s=1)


def group_with(backends):
    """Let the group say that it has ``backends``: this machine has gloo alone."""
    return mock.patch.object(dist, "get_backend_config", return_value=backends)


def case_other_backend():
    text = 'needs a group with gloo for CPU tensors or NCCL for CUDA tensors, got "cpu:mpi"'
    with group_with("cpu:mpi"), raises(RuntimeError, text):
        transport.open("torch")


def case_no_gpu():
    """A group with NCCL where it cannot be: all ranks say so alike; host rows need gloo alone."""
    lacks = transport.available()["nccl"]
    if lacks is None:
        return
    text = lacks.replace('transport "nccl"', 'rank 0 of 2: transport "torch"')
    for _ in range(2):
        with group_with("cuda:nccl"), raises(RuntimeError, text):
            transport.open("torch", timeout_s=20)
    with group_with("cpu:gloo,cuda:nccl"), transport.open("torch", timeout_s=20) as t:
        assert t.device is None
        check_rows(t)
        case_counts(t)


for case in sys.argv[1:]:
    globals()[f"case_{case}"]()
    say("ok", case)
