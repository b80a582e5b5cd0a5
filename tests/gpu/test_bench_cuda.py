"""The benchmark on a GPU: what it times, what its check notices, and its commands."""

import dataclasses
import json

import numpy as np
import on_device
import pytest
import ranks
import torch
from click.testing import CliRunner
from compiled import kernels_are_compiled  # noqa: F401
from on_device import busy, synchronize, to
from test_bench import FAULTS, SMALL

from fp4comm import AllToAll, Precision, WireFormat, transport
from fp4comm.bench import product
from fp4comm.bench import run as bench
from fp4comm.bench.check import Checked, Checker, expert_outputs
from fp4comm.bench.clock import Stopwatch
from fp4comm.bench.plain import plain_dispatch
from fp4comm.bench.rows import ALSO, PARTS, RELAY
from fp4comm.cli import cli
from fp4comm.routing import Placement

DEVICE = on_device.DEVICE
TINY = ["--tokens", "24", "--hidden", "160", "--experts", "6", "--topk", "3"]
TINY += ["--warmup", "1", "--iterations", "2", "--device", DEVICE.type]
on_a_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")


@on_a_gpu
def test_the_time_holds_the_work():  # BEN-08
    stopwatch = Stopwatch(transport.open("local"), "cuda")
    stopwatch.time(lambda: busy(1))
    busy(200)  # earlier work is not counted
    _, nothing = stopwatch.time(lambda: None)
    result, took = stopwatch.time(lambda: busy(20) or 5)
    assert result == 5
    assert took >= 15e6  # the GPU's clock is 2 GHz at most
    assert nothing < 10e6


@pytest.mark.parametrize("arrive", ["fp8", "bf16", "packed"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_row_is_right(arrive, num_ranks):
    workload = dataclasses.replace(SMALL, num_ranks=num_ranks)
    settings = bench.Settings(
        ("bf16", "fp8", "mxfp8", "mxfp4"),
        combine="same",
        arrive=arrive,
        warmup=1,
        iterations=2,
        device=DEVICE.type,
        plain=True,
        also=ALSO,
    )
    report, *_ = transport.run_local(
        num_ranks, lambda t: next(bench.measure_each(t, [workload], settings)), timeout_s=120
    )
    assert [row.op for row in report.rows] == ["plain", *["dispatch", "combine", *ALSO] * 4]
    parts = {**PARTS, "overlap": ("dispatch", "product")}
    for row in report.rows:
        assert row.num_wrong == 0, row
        assert row.num_checked > 0
        assert row.time.median_us > 0
        assert set(row.parts_us) == {*parts.get(row.op, ())} - {RELAY}
        assert all(us > 0 for us in row.parts_us.values())


@on_a_gpu
def test_the_host_does_not_wait_for_a_product():
    made = product.sized(
        Stopwatch(transport.open("local"), "cuda"), torch.device("cuda"), target_us=300.0
    )
    busy(500)
    made.run()
    assert not torch.cuda.current_stream().query()
    synchronize()


def dispatched():
    """What rank 1 of 2 got of a dispatch on the device, with its checker and what came back."""

    def on_rank(t):
        a2a = AllToAll(
            t, num_experts=6, hidden=160, precision=Precision("mxfp4"), expert_alignment=50
        )
        x = SMALL.rows(t.rank, np.arange(SMALL.tokens))
        d = a2a.dispatch(*to(DEVICE, (x, *map(torch.from_numpy, SMALL.routing(t.rank)))))
        checker = Checker(SMALL, t.rank, "fp8", 50, None)
        return d, a2a.combine(expert_outputs(d, checker.experts), d.handle), checker

    return transport.run_local(2, on_rank)[1]


@pytest.mark.parametrize(("fault", "row", "num_wrong"), FAULTS)
def test_the_check_counts_wrong_rows(fault, row, num_wrong):
    d, y, checker = dispatched()
    wire = WireFormat("mxfp4")
    assert checker.dispatch(d, wire).num_wrong == 0
    assert checker.combine(y, wire, WireFormat("bf16")) == Checked(40, 0)
    fault(d, row)
    assert checker.dispatch(d, wire).num_wrong == num_wrong
    y.view(torch.int16)[7, 0] ^= 1
    assert checker.combine(y, wire, WireFormat("bf16")) == Checked(40, 1)


def test_the_plain_all_to_all_gives_the_copies_of_the_cpu():
    def on_rank(t):
        x = SMALL.rows(t.rank, np.arange(SMALL.tokens))
        idx = torch.from_numpy(SMALL.routing(t.rank)[0]).clone()
        idx[::5, 1] = -1
        want, splits = plain_dispatch(t, Placement(6, 2), x, idx)
        got, own = plain_dispatch(t, Placement(6, 2), x.to(DEVICE), idx.to(DEVICE))
        assert got.device.type == DEVICE.type
        assert torch.equal(got.cpu().view(torch.int16), want.view(torch.int16))
        assert own.tolist() == splits.tolist()

    transport.run_local(2, on_rank, timeout_s=30)


def test_the_command_says_what_it_ran_on(tmp_path):
    file = tmp_path / "out.json"
    result = CliRunner().invoke(cli, ["bench", *TINY, "--ranks", "2", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "# wrong rows: 0 OK"
    content = json.loads(file.read_text())
    assert content["arguments"]["device"] == DEVICE.type
    assert content["gpus"] == (0 if DEVICE.type == "cpu" else min(2, torch.cuda.device_count()))
    if DEVICE.type == "cuda":
        assert "parts (in --json): as many further calls" in result.output


@on_a_gpu
def test_several_cases_with_a_round_trip_and_an_overlap(tmp_path):
    file = tmp_path / "out.json"
    options = ["--tokens", "1", "--wire", "bf16,mxfp4", "--also", ",".join(ALSO), "--no-plain"]
    result = CliRunner().invoke(cli, ["bench", *TINY, *options, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "all on one stream of the caller's" in result.output
    contents = json.loads(file.read_text())
    assert [content["tokens"] for content in contents] == [[24, 24], [1, 1]]
    for content in contents:
        assert content["wrong_rows"] == 0
        assert [row["op"] for row in content["rows"]] == ["dispatch", "combine", *ALSO] * 2
        for row in content["rows"]:
            if row["op"] == "overlap":
                alone = row["parts_us"]["dispatch"], row["parts_us"]["product"]
                share = (sum(alone) - row["time"]["median_us"]) / alone[0]
                assert row["beside"]["hidden_share"] == pytest.approx(share)
            else:
                assert row["beside"] is None


def test_the_demo_runs(tmp_path):
    options = ("--ranks", "2", "--warmup", "1", "--iterations", "1", "--device", DEVICE.type)
    result = CliRunner().invoke(cli, ["demo", *options])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("OK: 0 wrong of ")


@on_a_gpu
def test_the_figures_of_planning_are_right_and_written(tmp_path):
    file = tmp_path / "plan.json"
    sizes = ["--tokens", "1000", "--ranks", "8", "--iterations", "3", "--json", file]
    done = ranks.python(ranks.ROOT / "benchmarks" / "plan_cuda.py", *sizes)
    ranks.passed(done)
    rows = json.loads(file.read_text())["rows"]
    assert [row["op"] for row in rows] == ["plan", "expert_layout"]
    for row in rows:
        assert row["num_wrong"] == 0
        assert row["wall_us"] > row["busy_us"] > 0
