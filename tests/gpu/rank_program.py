"""What the ranks of test_nccl_ranks.py do: ``rank_program.py TRANSPORT PART...``, under mpirun.

TRANSPORT: nccl, torch (a group with NCCL) or mpi (rows staged); PART: rounds, mistakes, streams,
gradients, or two_hop: all but mistakes by that route.
"""

import dataclasses
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gradients
import mistakes
import rounds
import stream_cases
import torch
import two_hop
from gpu_rounds import GPU_ROUNDS
from mpi4py import MPI
from on_device import DEVICE, AllToAllOnDevice, to

from fp4comm import AllToAll, launch, transport

TIMEOUT_S = 60


def open_transport(name):
    """Open a transport on the GPU that is this rank's by its place on its machine."""
    launch.use_device(DEVICE.type, launch.local_rank())
    if name == "torch" and not torch.distributed.is_initialized():
        os.environ["RANK"] = str(launch.launched_rank())
        os.environ["WORLD_SIZE"] = str(launch.launched_ranks())
        torch.distributed.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    return transport.open(name, timeout_s=TIMEOUT_S)


def say(t, text):
    print(f"rank {t.rank}: {text}", flush=True)  # noqa: T201


def share_expected(t, cases):
    """Let each rank work out the reference of some rounds, for all."""
    mine = {case: rounds.expected(case, t.num_ranks) for case in cases[t.rank :: t.num_ranks]}
    shared = {case: want for part in MPI.COMM_WORLD.allgather(mine) for case, want in part.items()}
    rounds.expected = stream_cases.expected = lambda case, num_ranks: shared[case]


def run_rounds(name):
    with open_transport(name) as t:
        for case in GPU_ROUNDS:
            try:
                rounds.check_round(t, case)
            except BaseException:
                say(t, f"in round {case.id!r}")
                raise
        say(t, f"{len(GPU_ROUNDS)} rounds right")


def run_mistakes(name):
    with open_transport(name) as t:
        number = mistakes.check_mistakes(t)
        if t.device is not None:
            check_rows_on_the_host_are_refused(t)
        say(t, f"{number} mistakes right")


def check_rows_on_the_host_are_refused(t):
    """NCCL takes rows of its GPU alone: x on the CPU on one rank is the same error on all."""
    last = t.num_ranks - 1
    args = mistakes.good_call() if t.rank == last else to(DEVICE, mistakes.good_call())
    text = r"rank {r} of {n}: x: expected on cuda:\d+, .* got cpu"
    mistake = mistakes.Mistake("x on the CPU", None, ValueError, text)
    a2a = AllToAll(t, **mistakes.GOOD)
    mistakes.expect(mistake, last, t.num_ranks, lambda: a2a.dispatch(*args))
    good = to(DEVICE, mistakes.good_call())
    assert a2a.dispatch(*good).num_rows_list, "it stays usable"


def run_gradients(name):
    with open_transport(name) as t:
        for case in gradients.CASES:
            try:
                gradients.check_gradients(t, case, DEVICE)
            except BaseException:
                say(t, f"in gradients of {case.id!r}")
                raise
        say(t, f"{len(gradients.CASES)} gradients right")


def run_streams(name):
    names = [case for case in stream_cases.CASES if case not in stream_cases.BREAKING]
    for cases in (names, *([case] for case in stream_cases.BREAKING)):
        t = open_transport(name)
        for case in cases:
            try:
                stream_cases.run(t, case)
            except BaseException:
                say(t, f"in case {case}")
                raise
            say(t, f"ok {case}")
        t.close()


def stream_case_of(num_ranks):
    """The round of the streams' cases, by the two-hop route."""
    return dataclasses.replace(stream_cases.CASE, node_sizes=two_hop.node_sizes(num_ranks)[0])


def run_two_hop(name):
    with open_transport(name) as t:
        for case in two_hop.rounds_of(t.num_ranks, GPU_ROUNDS):
            try:
                rounds.check_round(t, case)
            except BaseException:
                say(t, f"in round {case.id!r}, nodes {case.node_sizes}")
                raise
        for case in two_hop.gradient_cases(t.num_ranks):
            try:
                gradients.check_gradients(t, case, DEVICE)
            except BaseException:
                say(t, f"in gradients of {case.id!r}, nodes {case.node_sizes}")
                raise
        two_hop.check_auto(t, DEVICE)
        two_hop.check_async(t, DEVICE)
        say(t, "two hops right")
    stream_cases.CASE = stream_case_of(t.num_ranks)
    run_streams(name)


def main(name, *parts):
    with transport.open("mpi", timeout_s=TIMEOUT_S) as t:
        cases = [*(GPU_ROUNDS if "rounds" in parts else ()), stream_cases.CASE]
        if "two_hop" in parts:
            cases += [*two_hop.rounds_of(t.num_ranks, GPU_ROUNDS), stream_case_of(t.num_ranks)]
        share_expected(t, cases)
    rounds.AllToAll = mistakes.AllToAll = AllToAllOnDevice
    for part in parts:
        globals()[f"run_{part}"](name)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
