"""One rank fails at one point of a round; the others must raise in time, and say where and who.

``failures.py TRANSPORT HOW WHERE``: HOW is stall, raise, die or leave; WHERE counts, exchange or
combine.
Also imported by test_failures.py for ranks on threads.
"""

import contextlib
import os
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mistakes
import transport_cases

from fp4comm import AllToAll, transport

TIMEOUT_S = 1.5
WAITED_FOR = ("stall", "die")  # else the others hear of it, long before their time is over
VICTIM, LAST_WORDS = 2, "the disk is full"


def fail(how, group):
    if how == "leave":
        sys.exit(3)  # orderly: through MPI_Finalize
    if how == "die":
        os._exit(7)
    if how == "raise":
        group.abort(LAST_WORDS)
        raise MemoryError(LAST_WORDS)
    time.sleep(2 * TIMEOUT_S)  # past the others' patience


def be_the_victim(group, a2a, how, where):
    if where == "exchange":
        exchange = group.exchange
        group.exchange = lambda *args, **kwargs: fail(how, group) or exchange(*args, **kwargs)
    if where == "counts":
        fail(how, group)
    d = a2a.dispatch(*mistakes.good_call())
    if where == "combine":
        fail(how, group)
    a2a.combine(d.rows, d.handle)


def survive(group, a2a, how, where):
    """Check type, text and time of the error, and that the transport then says it is broken."""
    start = time.monotonic()
    raised = None
    try:
        d = a2a.dispatch(*mistakes.good_call())
        a2a.combine(d.rows, d.handle)
    except (RuntimeError, OSError) as error:
        raised = error
    took = time.monotonic() - start
    phase = {
        "counts": "dispatch counts", "exchange": "dispatch exchange", "combine": "combine exchange"
    }[where]  # fmt: skip
    if how == "raise":
        assert isinstance(raised, RuntimeError), repr(raised)
        assert re.search(f"stopped by rank {VICTIM}: .*{LAST_WORDS}", str(raised)), raised
    else:
        died = how in ("die", "leave") and isinstance(raised, ConnectionError)
        assert isinstance(raised, TimeoutError) or died, repr(raised)
        assert f"of 3: {phase}" in str(raised), raised
        assert f"rank {VICTIM}" in str(raised), raised
        if how in WAITED_FOR:
            assert took < TIMEOUT_S + 10, took
        else:
            assert died, repr(raised)  # heard of, not waited for
    broken = None
    with contextlib.suppress(RuntimeError):
        a2a.dispatch(*mistakes.good_call())
        broken = "used again"
    assert broken is None, "a broken transport was used again"


def on_rank(group, how, where):
    a2a = AllToAll(group, **mistakes.GOOD, arrive="bf16", timeout_s=30)
    d = a2a.dispatch(*mistakes.good_call())  # compiles, and shows that all is well
    a2a.combine(d.rows, d.handle)
    transport_cases.all_here(group)
    if how in WAITED_FOR:
        a2a.timeout_s = TIMEOUT_S
    if group.rank == VICTIM:
        with contextlib.suppress(MemoryError, RuntimeError, OSError):
            be_the_victim(group, a2a, how, where)
    else:
        survive(group, a2a, how, where)
        print(f"rank {group.rank} survived", flush=True)


def main(name, how, where):
    if name == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
    group = transport.open(name, timeout_s=30)
    on_rank(group, how, where)
    if how in ("stall", "raise"):
        transport_cases.meet(group)
    else:
        time.sleep(1)  # until the other survivor has said so too
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
