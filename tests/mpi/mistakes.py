"""Make every mistake of tests/mistakes.py on real ranks: ``mistakes.py mpi`` or ``... torch``."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mistakes import DIFFERENT_CALLS, check_mistakes, make_different_calls

from fp4comm import transport

name = sys.argv[1]
if name == "torch":
    import torch.distributed as dist

    dist.init_process_group("gloo")
with transport.open(name, timeout_s=30) as group:
    print(f"rank {group.rank}: {check_mistakes(group)} mistakes right", flush=True)
for case in DIFFERENT_CALLS:
    group = transport.open(name, timeout_s=30)
    print(f"rank {group.rank}: told: {make_different_calls(group, case)}", flush=True)
    group.close()
# The first MPI rank to leave ends the job, after calls that failed: until all have said theirs.
transport.open(name, timeout_s=30).close()
time.sleep(1)
