"""Make every mistake of tests/mistakes.py on real ranks: ``mistakes.py mpi`` or ``... torch``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mistakes import check_mistakes

from fp4comm import transport

if sys.argv[1] == "torch":
    import torch.distributed as dist

    dist.init_process_group("gloo")
with transport.open(sys.argv[1], timeout_s=30) as group:
    print(f"rank {group.rank}: {check_mistakes(group)} mistakes right", flush=True)
