"""Bad input gets one clear error on every rank; what is found after the counts stops the peers."""

import pickle
import subprocess
import sys
import threading

import mistakes
import numpy as np
import pytest
import ranks
import torch

from fp4comm import AllToAll, PackedRows, Precision, WireFormat, quantize, transport


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_mistake_on_threads(num_ranks):
    transport.run_local(num_ranks, mistakes.check_mistakes, timeout_s=30)


def test_every_mistake_under_mpirun():
    run = ranks.mpirun(3, "mistakes.py", "mpi")
    assert run.stdout.count("mistakes right") == 3, ranks.report(run)
    assert run.stdout.count("told: ") == 3 * len(mistakes.DIFFERENT_CALLS), ranks.report(run)


def test_every_mistake_on_torch_distributed():
    runs = ranks.torch_ranks(2, "mistakes.py", "torch")
    ranks.passed(*runs)


@pytest.mark.parametrize("name", mistakes.DIFFERENT_CALLS)
def test_combines_of_different_dispatches_do_not_mix(name):
    texts = transport.run_local(2, lambda t: mistakes.make_different_calls(t, name), timeout_s=30)
    assert all("all ranks must make the same calls" in text for text in texts), texts


def test_ins_14_the_same_errors_without_asserts():
    """Under python -O, on three threads."""
    code = (
        f"import sys; sys.path.insert(0, {str(ranks.SCRIPTS.parent)!r})\n"
        "import mistakes\n"
        "from fp4comm import AllToAll, transport\n"
        "def last(t):\n"
        "    a2a = AllToAll(t, **mistakes.GOOD)\n"
        "    texts = []\n"
        "    for m in mistakes.DISPATCH_MISTAKES:\n"
        "        args = mistakes.good_call()\n"
        "        try:\n"
        "            a2a.dispatch(*(m.change(args) if t.rank == 2 else args))\n"
        "        except m.error as error:\n"
        "            texts.append(str(error))\n"
        "    return texts\n"
        "texts = transport.run_local(3, last, timeout_s=30)\n"
        "print(texts[0] == texts[1] == texts[2], len(texts[0]))\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", str(len(mistakes.DISPATCH_MISTAKES))], done.stderr


def combine_with(change):
    """Run combine on 3 ranks with a mistake on rank 1; return what each rank raised."""

    dispatched = threading.Barrier(3)  # else the mistake may stop a peer that still dispatches

    def on_rank(t):
        a2a = AllToAll(t, **mistakes.GOOD, arrive="bf16")
        d = a2a.dispatch(*mistakes.good_call())
        dispatched.wait(30)
        args = (d.rows, d.handle)
        try:
            a2a.combine(*(change(a2a, *args) if t.rank == 1 else args))
        except Exception as error:
            first = error
        else:
            return None
        with pytest.raises(RuntimeError, match="broken"):
            a2a.dispatch(*mistakes.good_call())
        return first

    return transport.run_local(3, on_rank, timeout_s=30)


def other_handle(a2a, rows, handle):
    return rows, AllToAll(transport.open("local"), **mistakes.GOOD).dispatch(
        *mistakes.good_call()
    ).handle


COMBINE_MISTAKES = {
    "rows missing": (lambda a, rows, h: (rows[:-1], h), ValueError, "expert_out: expected shape"),
    "another dtype": (lambda a, rows, h: (rows.float(), h), TypeError, "expert_out: expected bfl"),
    "no handle": (lambda a, rows, h: (rows, None), TypeError, "handle: expected a Handle, got No"),
    "the handle of another transport": (other_handle, ValueError, "handle: made on another"),
}


@pytest.mark.parametrize("name", COMBINE_MISTAKES)
def test_a_mistake_in_combine_stops_the_peers(name):
    """Their error says whose mistake it was; the transport then says that it is broken (COM-22)."""
    change, error, text = COMBINE_MISTAKES[name]
    zero, one, two = combine_with(change)
    assert type(one) is error
    assert text in str(one)
    for peer in (zero, two):
        assert isinstance(peer, RuntimeError), peer
        assert "stopped by rank 1: combine" in str(peer)
        assert text in str(peer)


def test_handles_are_checked():
    group = transport.open("local")
    d = AllToAll(group, **mistakes.GOOD, arrive="bf16").dispatch(*mistakes.good_call())
    with pytest.raises(AttributeError):
        d.handle.layout = None
    for kwargs, text in (
        ({"hidden": 96}, "handle: made for hidden 64, used with hidden 96"),
        ({"precision": Precision("fp8")}, "handle: made for precision"),
    ):
        group = transport.open("local")
        d = AllToAll(group, **mistakes.GOOD, arrive="bf16").dispatch(*mistakes.good_call())
        other = AllToAll(group, **(mistakes.GOOD | kwargs))
        with pytest.raises(ValueError, match=text):
            other.combine(d.rows, d.handle)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((torch.ones(4, 64).bfloat16(),), "x: expected 5 tokens, which handle was made for, got 4"),
        ((torch.ones(5, 64),), "x: expected bfloat16"),
    ],
)
def test_a_second_dispatch_with_a_handle_checks_x(args, text):
    a2a = AllToAll(transport.open("local"), **mistakes.GOOD)
    handle = a2a.dispatch(*mistakes.good_call()).handle
    with pytest.raises((ValueError, TypeError), match=text):
        a2a.dispatch(*args, handle=handle)


def test_a_handle_and_a_routing_exclude_each_other():
    a2a = AllToAll(transport.open("local"), **mistakes.GOOD)
    x, idx, weights = mistakes.good_call()
    handle = a2a.dispatch(x, idx, weights).handle
    with pytest.raises(ValueError, match="handle: expected without topk_idx"):
        a2a.dispatch(x, idx, weights, handle=handle)


def test_all_to_all_needs_a_transport():
    with pytest.raises(
        TypeError, match="transport: expected one from fp4comm.transport.open, got s"
    ):
        AllToAll("mpi", **mistakes.GOOD)


def test_numpy_integers_are_integers():
    group = transport.open("local", timeout_s=7)
    a2a = AllToAll(group, num_experts=np.int64(10), hidden=np.int32(64))
    assert a2a.dispatch(*mistakes.good_call()).num_rows_list == [2] * 5 + [1] * 5
    assert group.timeout_s == 7
    assert group.phase is None
    assert group.label == ""


def test_a_closed_object_says_so():
    with AllToAll(transport.open("local"), **mistakes.GOOD) as a2a:
        a2a.dispatch(*mistakes.good_call())
    with pytest.raises(RuntimeError, match="AllToAll: expected an open object, got a closed one"):
        a2a.dispatch(*mistakes.good_call())


def test_an_object_is_not_pickled():
    a2a = AllToAll(transport.open("local"), **mistakes.GOOD)
    with pytest.raises(TypeError, match="AllToAll: expected to stay in its process"):
        pickle.dumps(a2a)


QUANTIZE_MISTAKES = [
    ((torch.ones(2, 33),), ValueError, "x: expected hidden to be a multiple of 32, got 33"),
    ((torch.ones(64),), ValueError, r"x: expected shape \[tokens, hidden\], got \[64\]"),
    ((torch.ones(2, 64).half(),), TypeError, "x: expected bfloat16, float32 or an FP8 pair"),
    ((torch.ones(2, 64), "mxfp5"), ValueError, "wire: expected one of bf16, fp8, mxfp8"),
    ((torch.ones(2, 64), 4), TypeError, "wire: expected a name or a WireFormat, got int"),
    ((torch.ones(2, 64, requires_grad=True),), RuntimeError, "x: expected no gradient"),
    (("text",), TypeError, "x: expected a tensor, got str"),
]


@pytest.mark.parametrize(("args", "error", "text"), QUANTIZE_MISTAKES)
def test_quantize_checks(args, error, text):
    with pytest.raises(error, match=text):
        quantize(*args)


def test_quantize_checks_the_rule():
    with pytest.raises(ValueError, match="scale_rule: expected one of ceil, floor for fp8, got 'e"):
        quantize(torch.ones(2, 64), "fp8", scale_rule="even")
    with pytest.raises(ValueError, match="scale_rule: expected None for bf16, got 'floor'"):
        WireFormat("bf16", scale_rule="floor")


def test_packed_rows_check_their_parts():
    """NUM-03: scales handed over as int8 are refused, not read with another sign."""
    packed = quantize(torch.ones(2, 64))
    for change, error, text in (
        ({"scales": packed.scales.view(torch.int8)}, TypeError, "scales: expected a uint8 tensor"),
        ({"scales": packed.scales[:, :1]}, ValueError, r"scales: expected shape \[2, 2\]"),
        ({"payload": packed.payload[:1]}, ValueError, r"scales: expected shape \[1, 2\]"),
        ({"hidden": 96}, ValueError, r"payload: expected shape \[2, 48\]"),
        ({"payload": torch.tensor(1, dtype=torch.uint8)}, ValueError, r"payload: expected .*, got"),
        ({"format": "fp8"}, ValueError, r"payload: expected shape \[2, 64\]"),
    ):
        parts = {"payload": packed.payload, "scales": packed.scales, "hidden": 64}
        with pytest.raises(error, match=text):
            PackedRows(**({"format": packed.format} | parts | change))


def test_a_layout_of_other_rows_is_refused():
    a2a = AllToAll(transport.open("local"), **mistakes.GOOD)
    layout = a2a.dispatch(*mistakes.good_call()).handle.layout
    packed = quantize(torch.ones(2, 64))
    for convert in (packed.to_fp8_rows, packed.to_fp8_columns, packed.to_bf16, packed.expand):
        with pytest.raises(ValueError, match="layout: expected one of 2 wire rows, got 5"):
            convert(layout)
    with pytest.raises(ValueError, match="scale_layout: expected one of row, column, got 'm'"):
        packed.to_fp8_rows(scale_layout="m")
