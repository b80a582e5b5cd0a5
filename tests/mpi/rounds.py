"""Run every round of tests/rounds.py on real ranks: ``rounds.py mpi`` or ``rounds.py torch``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rounds import ROUNDS, check_round

from fp4comm import transport


def main(name):
    if name == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
    with transport.open(name, timeout_s=60) as group:
        for case in ROUNDS:
            try:
                check_round(group, case)
            except Exception:
                print(f"rank {group.rank}: in round {case.id!r}", flush=True)
                raise
        print(f"rank {group.rank}: {len(ROUNDS)} rounds right", flush=True)


main(sys.argv[1])
