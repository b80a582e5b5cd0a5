"""Check cases of tests/ on real ranks: ``cases.py mpi rounds two_hops``."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import expert_layers
import gradients
import rounds
import two_hop

from fp4comm import transport
from fp4comm.hops.nodes import NODE_VARIABLE

FEW = slice(None, None, 6)


def check_each(group, check, cases):
    for case in cases:
        try:
            check(group, case)
        except Exception:
            print(f"rank {group.rank}: in {case.id!r}", flush=True)
            raise


def set_host(name):
    os.environ[NODE_VARIABLE] = name


def check_two_hops(group):
    """The ranks are two nodes, or more."""
    check_each(group, rounds.check_round, two_hop.rounds_of(group.num_ranks, rounds.ROUNDS[FEW]))
    cases = two_hop.gradient_cases(group.num_ranks)[FEW]
    check_each(group, gradients.check_gradients, cases)
    two_hop.check_auto(group)
    two_hop.check_async(group)
    two_hop.check_hosts(group, set_host)


CHECKS = {
    "rounds": lambda group: check_each(group, rounds.check_round, rounds.ROUNDS),
    "gradients": lambda group: check_each(group, gradients.check_gradients, gradients.SOME_CASES),
    "layers": lambda group: check_each(group, expert_layers.check_layer, expert_layers.SOME_CASES),
    "two_hops": check_two_hops,
}


def main(name, *names):
    if name == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
    with transport.open(name, timeout_s=60) as group:
        for check in names:
            CHECKS[check](group)
            print(f"rank {group.rank}: {check} right", flush=True)


main(*sys.argv[1:])
