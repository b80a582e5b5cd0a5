"""Check some cases of tests/gradients.py on real ranks: ``gradients.py mpi`` or ``... torch``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gradients import SOME_CASES, check_gradients

from fp4comm import transport


def main(name):
    if name == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
    with transport.open(name, timeout_s=60) as group:
        for case in SOME_CASES:
            try:
                check_gradients(group, case)
            except Exception:
                print(f"rank {group.rank}: in {case.id!r}", flush=True)
                raise
        print(f"rank {group.rank}: {len(SOME_CASES)} cases right", flush=True)


main(sys.argv[1])
