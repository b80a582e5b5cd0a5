"""Check some cases of tests/expert_layers.py on real ranks: ``expert_layers.py mpi``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from expert_layers import SOME_CASES, check_layer

from fp4comm import transport


def main(name):
    with transport.open(name, timeout_s=60) as group:
        for case in SOME_CASES:
            check_layer(group, case)
        print(f"rank {group.rank}: {len(SOME_CASES)} layers right", flush=True)


main(sys.argv[1])
