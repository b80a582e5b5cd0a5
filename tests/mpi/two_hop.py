"""Check the two-hop route on real ranks, two a node: ``two_hop.py mpi`` or ``two_hop.py torch``."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import two_hop
from gradients import check_gradients
from rounds import ROUNDS, check_round

from fp4comm import transport
from fp4comm.hops.nodes import NODE_VARIABLE

FEW = slice(None, None, 6)


def set_host(name):
    os.environ[NODE_VARIABLE] = name


def main(name):
    if name == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
    with transport.open(name, timeout_s=two_hop.TIMEOUT_S) as group:
        for case in two_hop.rounds_of(group.num_ranks, ROUNDS[FEW]):
            check_round(group, case)
        for case in two_hop.gradient_cases(group.num_ranks)[FEW]:
            check_gradients(group, case)
        two_hop.check_auto(group)
        two_hop.check_async(group)
        two_hop.check_hosts(group, set_host)
        print(f"rank {group.rank}: two hops right", flush=True)


main(sys.argv[1])
