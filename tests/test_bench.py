"""Benchmark: formulas, generators, what is timed and what the check inside it notices."""

import dataclasses
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fp4comm import AllToAll, Precision, WireFormat, machine, transport
from fp4comm.bench import product
from fp4comm.bench import rows as bench_rows
from fp4comm.bench import run as bench
from fp4comm.bench.cases import SWEPT, Case, cases_of, varying
from fp4comm.bench.check import Checked, Checker, expert_outputs, sample
from fp4comm.bench.environment import Environment, Place
from fp4comm.bench.plain import plain_dispatch
from fp4comm.bench.recorded import Recorded, read_routing
from fp4comm.bench.report import Table, as_json
from fp4comm.bench.workload import (
    Synthetic,
    balanced_experts,
    distinct_experts,
    zipf_popularity,
)
from fp4comm.codec import cpu
from fp4comm.routing import Placement
from fp4comm.transport.local import LocalTransport

DATA = Path(__file__).resolve().parent / "data"
MIB = 2**20
SMALL = Synthetic(2, tokens=40, hidden=160, num_experts=6, num_topk=3, skew=0.5)


# Formulas


def test_bandwidth_counts_only_what_leaves_the_rank():  # BEN-01
    matrix = np.full((4, 4), 16 * MIB)
    sent = bench_rows.traffic(matrix)
    assert bench_rows.bandwidth_gbs(sent.sent, 1000) == pytest.approx(67.109, abs=1e-3)
    assert bench_rows.bandwidth_gbs(sent.sent_to_others, 1000) == pytest.approx(50.332, abs=1e-3)


def test_bandwidth_of_a_ragged_exchange_is_the_busiest_ranks():  # BEN-03
    matrix = np.array([[8, 12, 15, 14], [1, 0, 0, 9], [0, 0, 0, 0], [40, 2, 3, 5]]) * MIB
    sent = bench_rows.traffic(matrix)
    assert sent == bench_rows.Traffic(50 * MIB, 45 * MIB, 109 * MIB, (41 + 10 + 0 + 45) * MIB)
    assert bench_rows.bandwidth_gbs(sent.sent_to_others, 1000) == pytest.approx(47.186, abs=1e-3)


def test_no_time_and_no_bytes_make_no_bandwidth():
    assert bench_rows.bandwidth_gbs(0, 5) == 0
    assert bench_rows.bandwidth_gbs(5, 0) == 0


def test_the_first_call_is_reported_apart():  # BEN-05
    summary = bench_rows.timing([200000, 12, 5, 4, 4, 5], warmup=1)
    assert summary == bench_rows.Timing(first_us=200000, median_us=5, p90_us=12)


def test_p90_is_the_nearest_rank():
    assert bench_rows.timing([0, *range(1, 11)], warmup=1).p90_us == 9
    assert bench_rows.timing([0, 7], warmup=1).p90_us == 7


@pytest.mark.parametrize(("warmup", "iterations"), [(0, 5), (-1, 5), (5, 0)])
def test_a_cold_or_empty_benchmark_is_refused(warmup, iterations):  # BEN-07
    with pytest.raises(ValueError, match="expected at least 1"):
        bench.Settings(("bf16",), warmup=warmup, iterations=iterations)


@pytest.mark.parametrize(
    ("wire", "num_bytes"), [("bf16", 14336), ("fp8", 7224), ("mxfp8", 7392), ("mxfp4", 3808)]
)
def test_bytes_of_a_row(wire, num_bytes):  # BEN-12
    assert bench_rows.row_bytes(WireFormat(wire), 7168) == num_bytes
    assert bench_rows.row_bytes(WireFormat(wire), 7168, num_topk=8) == num_bytes + 48


def test_speedup():  # BEN-17
    assert bench_rows.speedup(8000, 2000) == 4.0


def test_sqnr():
    assert bench_rows.sqnr_db(100.0, 1.0) == pytest.approx(20)
    assert bench_rows.sqnr_db(1.0, 0.0) is None
    assert bench_rows.sqnr_db(0.0, 0.0) is None
    assert bench_rows.sqnr_db(1.0, math.nan) is None


def test_what_a_product_hides_of_a_dispatch():
    assert bench_rows.hidden_share(4, 4, 8) == 0  # one after the other
    assert bench_rows.hidden_share(4, 5, 5) == 1
    assert bench_rows.hidden_share(4, 2, 4) == 0.5  # a shorter product hides no more than itself
    assert bench_rows.hidden_share(4, 4, 10) == -0.5


@pytest.mark.parametrize(
    ("target_us", "size", "repeats"),
    [
        (5 + 8**3, 128, 1),
        (4.0, 16, 1),  # less than the smallest takes
        (20 * (5 + 16**3), 256, 20),  # more than the largest takes
    ],
)
def test_a_product_is_sized_by_what_others_take(monkeypatch, target_us, size, repeats):
    monkeypatch.setattr(product, "MOST", 256)
    cost = lambda run: 5 + (run.__self__.size / 16) ** 3  # noqa: E731
    monkeypatch.setattr(product, "slowest_us", lambda stopwatch, run: cost(run))
    made = product.sized(None, torch.device("cpu"), target_us)
    assert abs(made.size - size) <= 16
    assert made.repeats == repeats
    made.run()


# Cases

SIZES = {"tokens": ["8", "1,8"], "hidden": ["64"], "experts": [], "topk": ["2,4"], "skew": []}
SIZES |= {"data": (), "routing": None, "seed": 3}


def test_every_combination_is_a_case_with_tokens_changing_fastest():
    cases = cases_of(SIZES, num_ranks=2)
    assert [(c.sizes["topk"], c.sizes["tokens"]) for c in cases] == [(2, 8), (2, 1), (4, 8), (4, 1)]
    assert [c.workload.num_tokens for c in cases[:2]] == [[8, 8], [1, 1]]
    assert {(c.workload.hidden, c.workload.num_experts, c.workload.skew) for c in cases} == {
        (64, 64, 0.0)
    }
    assert varying(cases) == ["topk", "tokens"]


def test_values_that_are_the_same_are_one_case():
    same = {"tokens": ["8,08", "+8"], "topk": ["2,2"], "skew": ["0,0.0", "balanced,-0,balanced"]}
    cases = cases_of(SIZES | same, num_ranks=2)
    assert [case.sizes["skew"] for case in cases] == [0.0, "balanced"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"topk": ["2,65"]}, "topk: expected at most 64"),
        ({"tokens": ["8,a few"]}, "tokens: expected whole numbers, got 'a few'"),
        ({"hidden": ["64,"]}, "hidden: expected whole numbers, got ''"),
        ({"skew": ["0,11"]}, "skew: expected"),
        ({"data": (DATA / "layer0.safetensors",), "seed": 0, "hidden": ["1024,64"], "topk": []},
         "hidden: expected 1024 with this data, got 64"),
        ({"routing": DATA / "layer0.safetensors", "topk": ["8,2"]},
         "topk: expected 8 with this routing, got 2"),
        ({"routing": DATA / "layer0.safetensors", "topk": [], "experts": ["64,32"]},
         r"layer0.safetensors: expected values in -1\.\.31 \(32 experts\), got 63"),
        ({"routing": DATA / "layer0.safetensors", "topk": [], "skew": ["1"]},
         "skew: expected none with this routing, got 1"),
        ({"routing": DATA / "layer0.safetensors", "topk": [], "tokens": ["8,-1"]},
         "tokens: expected 0..2147483647, got -1"),
        ({"routing": DATA / "layer0.safetensors", "topk": [], "hidden": ["64,100"]},
         "hidden: expected a multiple of 32"),
        ({"routing": DATA / "layer0.safetensors", "topk": [], "seed": -1},
         "seed: expected at least 0, got -1"),
        ({"routing": DATA / "layer0.safetensors", "data": (DATA / "layer0.safetensors",)},
         "routing: expected without data, which has its own, got both"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_last_case_is_found_first(changes, text):
    with pytest.raises(ValueError, match=text):
        cases_of({**SIZES, **changes}, num_ranks=2)


def test_recorded_data_may_be_cut_in_several_ways():
    options = {**SIZES, "hidden": (), "topk": (), "tokens": ("4,2",)}
    files = (DATA / "layer0.safetensors",)
    cases = cases_of({**options, "data": files, "seed": 0}, num_ranks=2)
    assert [case.workload.num_tokens for case in cases] == [[4, 4], [2, 2]]


def test_recorded_routing_goes_round_and_round_over_the_ranks():
    of_case = {"routing": DATA / "layer1.safetensors", "topk": [], "tokens": ["700"]}
    [case] = cases_of({**SIZES, **of_case}, num_ranks=2)
    work, recorded = case.workload, Recorded([DATA / "layer1.safetensors"], num_ranks=1)
    assert (work.num_tokens, work.hidden, work.num_experts) == ([700, 700], 64, 64)
    idx = np.concatenate([work.routing(rank)[0] for rank in range(2)])
    assert np.array_equal(idx[:1024], recorded.routing(0)[0])
    assert np.array_equal(idx[1024:], idx[: 1400 - 1024])
    assert work.rows(1, np.array([0, 699])).shape == (2, 64)


def test_recorded_routing_may_be_all_that_dispatch_takes(tmp_path):
    """An expert twice in a token, fewer experts than top-k, no expert."""
    file = tmp_path / "topk.npy"
    np.save(file, np.array([[0, 0], [0, -1], [-1, -1], [0, 0]]))
    [case] = cases_of({**SIZES, "routing": file, "topk": [], "tokens": ["3"]}, num_ranks=2)
    assert case.workload.num_experts == 1
    for report in measure(case.workload, wires=("bf16", "mxfp4"), arrive="bf16", check_all=True):
        assert report.num_wrong == 0


# Generators


def test_balanced_routing_leaves_no_rank_idle():  # BEN-10
    idx = balanced_experts(12, 4, Placement(128, 16), rank=0)
    owners = Placement(128, 16).owners[idx]
    assert np.bincount(owners.reshape(-1), minlength=16).tolist() == [3] * 16


@pytest.mark.parametrize(("experts", "ranks", "topk"), [(128, 16, 4), (10, 4, 10), (7, 3, 5)])
def test_balanced_routing_is_balanced_over_all_ranks_together(experts, ranks, topk):
    placement = Placement(experts, ranks)
    idx = np.concatenate([balanced_experts(35, topk, placement, rank) for rank in range(ranks)])
    assert all(len(set(token)) == topk for token in idx.tolist())
    load = np.bincount(idx.reshape(-1), minlength=experts)
    assert load.max() - load.min() <= 1


@pytest.mark.parametrize("skew", [0, 1.5])
def test_experts_of_a_token_are_distinct(skew):  # BEN-15
    popularity = zipf_popularity(16, skew, seed=3)
    idx = distinct_experts(10000, 8, popularity, np.random.default_rng(0))
    assert idx.shape == (10000, 8)
    assert (np.diff(np.sort(idx, axis=1), axis=1) > 0).all()
    assert set(idx.reshape(-1).tolist()) == set(range(16))


def test_skew_makes_some_experts_popular_on_all_ranks():
    loads = [_load(dataclasses.replace(SMALL, tokens=4000, skew=s)) for s in (0.0, 1.0)]
    for even, skewed in zip(*loads, strict=True):
        assert even.max() / even.mean() < 1.1
        assert skewed.max() / skewed.mean() > 1.5
    assert loads[1][0].argmax() == loads[1][1].argmax()


def _load(workload):
    return [np.bincount(workload.routing(rank)[0].reshape(-1), minlength=6) for rank in (0, 1)]


def test_inputs_depend_on_seed_rank_and_token_alone():
    tokens = np.array([3, 17])
    again = dataclasses.replace(SMALL, tokens=50)
    assert torch.equal(SMALL.rows(1, tokens), again.rows(1, np.arange(50))[tokens])
    assert not torch.equal(SMALL.rows(1, tokens), SMALL.rows(0, tokens))
    other = dataclasses.replace(SMALL, seed=1)
    assert not torch.equal(SMALL.rows(1, tokens), other.rows(1, tokens))
    assert not np.array_equal(SMALL.routing(0)[0], other.routing(0)[0])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden": 100}, "hidden: expected a multiple of 32"),
        ({"num_topk": 7}, r"topk: expected at most 6"),
        ({"num_topk": 0}, "topk: expected at least 1"),
        ({"tokens": -1}, "tokens: expected 0..2147483647, got -1"),
        ({"skew": "-1"}, "skew: expected"),
        ({"skew": "some"}, "skew: expected"),
        ({"skew": "nan"}, "skew: expected"),
        ({"skew": "10.1"}, 'skew: expected a number in 0..10 or "balanced", got'),
        ({"num_experts": 65535}, r"experts: expected at most 32767 a rank \(2 ranks\), got 65535"),
        ({"tokens": 2**31}, "tokens: expected 0..2147483647, got"),
        ({"seed": -1}, "seed: expected"),
    ],
)
def test_bad_sizes_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(SMALL, **changes)


def test_recorded_tokens_are_shared_out_in_order():
    recorded = Recorded([DATA / "layer0.safetensors", DATA / "layer7.safetensors"], num_ranks=3)
    assert recorded.num_tokens == [682, 683, 683]
    assert (recorded.hidden, recorded.num_topk, recorded.num_experts) == (1024, 8, 64)
    alone = Recorded([DATA / "layer7.safetensors"], num_ranks=1)
    last = np.array([681, 682])
    assert torch.equal(recorded.rows(2, last), alone.rows(0, last + 1024 - 683))
    assert np.array_equal(recorded.routing(2)[0], alone.routing(0)[0][-683:])


def test_recorded_tokens_may_be_fewer_but_not_more():
    files = [DATA / "layer0.safetensors"]
    assert Recorded(files, num_ranks=3, tokens=7).num_tokens == [7, 7, 7]
    with pytest.raises(ValueError, match=r"tokens: expected 0\.\.341 .* got 342"):
        Recorded(files, num_ranks=3, tokens=342)
    with pytest.raises(ValueError, match=r"topk_idx: expected values in -1\.\.31"):
        Recorded(files, num_ranks=3, num_experts=32)


def test_files_without_routing_are_named(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(3, 32)}, tmp_path / "x")
    save_file({"topk_idx": torch.zeros(3, 2, dtype=torch.bfloat16)}, tmp_path / "floats")
    (tmp_path / "empty.npy").touch()
    np.savez(tmp_path / "several.npz", topk_idx=np.zeros((3, 2), int))
    (tmp_path / "several.npz").rename(tmp_path / "zip.npy")
    for name in ("nothing", "x", "floats", "empty.npy", "zip.npy"):
        with pytest.raises(
            ValueError, match=f"routing: expected a .npy or .* topk_idx, got .*{name}"
        ):
            read_routing(tmp_path / name)


def test_routing_to_no_expert_needs_their_number(tmp_path):
    from safetensors.torch import save_file

    idx = torch.full((4, 2), -1)
    np.save(tmp_path / "none.npy", idx.numpy())
    data = {"x": torch.zeros(4, 32).bfloat16(), "topk_idx": idx, "topk_weights": torch.ones(4, 2)}
    save_file(data, tmp_path / "none")
    with pytest.raises(ValueError, match=r"routing: .*none.npy: expected some expert, or how many"):
        read_routing(tmp_path / "none.npy")
    with pytest.raises(ValueError, match=r"data: x from none: expected some expert, or how"):
        Recorded([tmp_path / "none"], num_ranks=2)
    assert read_routing(tmp_path / "none.npy", 4)[1] == 4
    assert Recorded([tmp_path / "none"], 2, num_experts=4).num_experts == 4
    save_file({**data, "topk_idx": idx[:, :0], "topk_weights": torch.ones(4, 0)}, tmp_path / "k0")
    with pytest.raises(ValueError, match=r"k0: expected topk_idx of .* got torch.int64 \[4, 0\]"):
        Recorded([tmp_path / "k0"], num_ranks=1)


def test_files_that_are_no_data_are_named(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(ValueError, match="data: expected a safetensors file, got .*nothing"):
        Recorded([tmp_path / "nothing"], num_ranks=1)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ValueError, match="data: expected a safetensors file, got .*text"):
        Recorded([tmp_path / "text"], num_ranks=1)
    save_file({"x": torch.zeros(3, 32)}, tmp_path / "x")
    with pytest.raises(ValueError, match=r"expected x of torch.bfloat16 .* got torch.float32"):
        Recorded([tmp_path / "x"], num_ranks=1)


# Measuring


def measure(workload, **settings):
    settings = bench.Settings(**{"wires": ("mxfp4",), "warmup": 1, "iterations": 1} | settings)
    num_ranks = len(workload.num_tokens)
    return transport.run_local(
        num_ranks, lambda t: next(bench.measure_each(t, [workload], settings)), 60
    )


@pytest.mark.parametrize("arrive", ["fp8", "bf16", "packed"])
@pytest.mark.parametrize("combine", ["bf16", "same"])
def test_every_row_is_right_and_has_the_bytes_that_travelled(arrive, combine):
    wires = ("bf16", "fp8", "mxfp8", "mxfp4")
    first, second = measure(SMALL, wires=wires, arrive=arrive, combine=combine, plain=True)
    assert first == second  # on every rank
    plain, *rows = first.rows
    assert [r.op for r in rows] == ["dispatch", "combine"] * 4
    assert {rows[0].expert_bytes - plain.wire_bytes.total} == {240 * 6}  # its route
    idxs = [SMALL.routing(rank)[0] for rank in (0, 1)]
    sent = [[int((idx // 3 == d).any(axis=1).sum()) for d in (0, 1)] for idx in idxs]
    for row in rows:
        matrix = np.array(sent) if row.op == "dispatch" else np.array(sent).T
        assert row.wire_rows == bench_rows.traffic(matrix)
        num_bytes = WireFormat(row.format).row_bytes(160) + (18 if row.op == "dispatch" else 0)
        assert row.wire_bytes == bench_rows.traffic(matrix * num_bytes)
        assert row.num_wrong == 0
        assert row.num_checked == (240 if row.op == "dispatch" else 80)
        assert row.time.median_us > 0


def test_routes_in_turn_and_the_bytes_across_nodes_and_inside_them():
    workload = dataclasses.replace(SMALL, num_ranks=4)
    settings = {"routes": ("flat", "two_hop"), "ranks_per_node": 2, "plain": True}
    plain, *rows = measure(workload, **settings)[0].rows
    ops = [(row.op, row.route) for row in rows]
    assert ops == [(op, r) for r in ("flat", "two_hop") for op in ("dispatch", "combine")]
    owners = Placement(6, 4).owners
    goes = np.zeros((4, 4), np.int64)  # rows from each rank to each
    crosses = np.zeros((4, 2), np.int64)  # and to each node
    for rank in range(4):
        for experts in workload.routing(rank)[0]:
            goes[rank, sorted(set(owners[experts].tolist()))] += 1
            crosses[rank, sorted(set((owners[experts] // 2).tolist()))] += 1
    num_bytes = WireFormat("mxfp4").row_bytes(160) + 18
    other = np.array([[0, 1], [0, 1], [1, 0], [1, 0]])
    flat, two_hop = rows[0], rows[2]
    assert flat.between_bytes == max((goes * np.repeat(other, 2, axis=1)).sum(1)) * num_bytes
    assert two_hop.between_bytes == max((crosses * other).sum(1)) * num_bytes
    assert two_hop.between_bytes < flat.between_bytes < plain.between_bytes
    assert two_hop.wire_rows.total == goes.sum() + crosses.sum()
    assert two_hop.inside_bytes > flat.inside_bytes > 0
    assert all(row.num_wrong == 0 and row.num_checked > 0 for row in rows)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_the_plain_all_to_all_sends_a_copy_to_each_expert(num_ranks):
    workload = dataclasses.replace(SMALL, num_ranks=num_ranks)
    row = measure(workload, plain=True)[0].rows[0]
    owners = Placement(6, num_ranks).owners
    idxs = [workload.routing(rank)[0] for rank in range(num_ranks)]
    copies = np.array([np.bincount(owners[i].reshape(-1), minlength=num_ranks) for i in idxs])
    assert row.wire_rows == bench_rows.traffic(copies)
    assert row.wire_bytes == bench_rows.traffic(copies * 320)
    assert (row.op, row.num_wrong, row.num_checked) == ("plain", 0, 120 * num_ranks)


def test_slots_without_an_expert_are_not_sent():
    idx = torch.tensor([[2, -1], [-1, -1], [0, 2]])
    x = torch.arange(3.0)[:, None].expand(3, 32).bfloat16()
    alone = transport.open("local")
    rows, recv_splits = plain_dispatch(alone, Placement(3, 1), x, idx)
    assert recv_splits.tolist() == [3]
    assert rows[:, 0].tolist() == [2.0, 0.0, 2.0]  # by expert, then token


def test_a_wrong_copy_of_the_plain_all_to_all_is_noticed():
    checker = Checker(SMALL, 1, "fp8", 50, None)
    sent = [[SMALL.rows(s, np.arange(40)), SMALL.routing(s)[0]] for s in (0, 1)]
    own = [x[np.flatnonzero(i.reshape(-1) == e) // 3] for x, i in sent for e in (3, 4, 5)]
    rows = torch.cat(own)
    assert checker.plain(rows) == Checked(len(rows), 0)
    rows.view(torch.int16)[5, 3] ^= 1
    assert checker.plain(rows) == Checked(len(rows), 1)
    assert checker.plain(rows[1:]) == Checked(len(rows), len(rows))


@pytest.mark.parametrize("route", ["flat", "two_hop"])
def test_a_round_trip_is_a_dispatch_and_its_combine(route):
    workload = dataclasses.replace(SMALL, num_ranks=4)
    settings = {"routes": (route,), "ranks_per_node": 2, "also": ("round_trip",)}
    reports = measure(workload, wires=("bf16", "mxfp4"), **settings)
    assert all(report == reports[0] for report in reports)
    for rows in (reports[0].rows[:3], reports[0].rows[3:]):
        dispatch, combine, both = rows
        assert [row.op for row in rows] == ["dispatch", "combine", "round_trip"]
        assert (both.format, both.route, both.parts_us) == (dispatch.format, route, {})
        for name in ("total", "total_to_others"):
            of_each = [getattr(row.wire_bytes, name) for row in (dispatch, combine)]
            assert getattr(both.wire_bytes, name) == sum(of_each)
        assert both.expert_bytes == dispatch.expert_bytes + combine.expert_bytes
        assert both.num_checked == dispatch.num_checked + combine.num_checked
        assert both.sqnr_db == dispatch.sqnr_db
        assert {row.num_wrong for row in rows} == {0}
        assert None not in [row.speedup_in(reports[0].rows) for row in rows]


def test_an_overlap_is_a_dispatch_beside_a_product(one_thread):
    first, second = measure(SMALL, also=("overlap",), iterations=3)
    assert first == second  # the size of the product too
    dispatch, _, overlap = first.rows
    assert overlap.op == "overlap"
    for name in ("format", "wire_rows", "wire_bytes", "bf16_bytes", "num_checked", "sqnr_db"):
        assert getattr(overlap, name) == getattr(dispatch, name)
    alone = overlap.parts_us
    assert alone.keys() == {"dispatch", "product"}
    assert alone["dispatch"] == dispatch.time.median_us
    share = bench_rows.hidden_share(*alone.values(), overlap.time.median_us)
    assert overlap.beside.hidden_share == share
    assert overlap.num_wrong == 0
    assert overlap.speedup_in(first.rows) is None


def test_an_overlap_has_a_column_and_a_line_below():
    report = measure(SMALL, also=("overlap",), iterations=3)[0]
    settings = bench.Settings(("mxfp4",), device="cuda", also=("overlap",))
    places = [Place("h", "", f"GPU-{gpu}") for gpu in range(2)]
    where = Environment("bench", 2, "nccl", places, machine.machine(), machine.versions())
    case = Case(dict.fromkeys(SWEPT), SMALL)
    table = Table(where, settings, [case])
    overlap = report.rows[-1]
    share = f"{100 * overlap.beside.hidden_share:.1f}"
    cells = [line.split() for line in table.rows(case, report)]
    assert "overlap" in table.head()[-2]
    assert [row[-4] for row in cells] == ["-", "-", share]
    (line,) = [line for line in table.foot([report]) if line.startswith("# overlap ")]
    assert f"({overlap.beside.size}x{overlap.beside.size} by " in line
    assert line.endswith(f": {share} % of the dispatch hidden")
    written = as_json("bench", {}, where, [case], [report])["rows"]
    assert written[-1]["beside"] == dataclasses.asdict(overlap.beside)
    assert [row["beside"] for row in written[:-1]] == [None, None]


def test_kernels_are_compiled_once_for_all_cases(monkeypatch):
    compiled = []
    monkeypatch.setattr(bench, "compile_first", lambda *_: compiled.append(1) or 2.0)
    settings = bench.Settings(("mxfp4",), warmup=1, iterations=1)
    told = []

    class Told(bench.progress.Tell):
        def __call__(self, text, share=0.0):
            told.append((text, share))

    workloads = [SMALL, dataclasses.replace(SMALL, tokens=3, num_topk=1)]

    def on_rank(t):
        tell = Told() if t.rank == 0 else bench.progress.NOTHING
        return list(bench.measure_each(t, workloads, settings, tell))

    first, second = transport.run_local(2, on_rank, 60)
    assert first == second
    assert [(r.num_tokens, r.num_topk, r.num_wrong) for r in first] == [
        ([40] * 2, 3, 0),
        ([3] * 2, 1, 0),
    ]
    assert len(compiled) == 2  # one a rank
    assert told[1] == ("case 1 of 2: making inputs", 0.0)
    assert told[-1] == ("case 2 of 2: checking against the reference", 0.75)


def test_hidden_2880():  # BEN-16
    report = measure(Synthetic(2, 8, 2880, 4, 2))[0]
    assert report.num_wrong == 0
    assert report.rows[0].wire_bytes.total == report.rows[0].wire_rows.total * (1530 + 12)


def test_ranks_wait_for_rank_0_to_compile_longer_than_for_a_peer(monkeypatch):
    monkeypatch.setattr(bench, "run_local", lambda *_: time.sleep(1.5))
    settings = bench.Settings(("mxfp4",))
    took_s = transport.run_local(2, lambda t: bench.compile_first(t, settings), timeout_s=0.3)
    assert took_s[0] == took_s[1] >= 1.5


@pytest.mark.parametrize(("routes", "num_calls"), [(("flat",), 0), (("flat", "two_hop"), 2)])
def test_the_relays_kernels_are_compiled_where_a_route_has_one(monkeypatch, routes, num_calls):
    calls, relay_reduce = [], cpu.relay_reduce
    monkeypatch.setattr(cpu, "relay_reduce", lambda *a: calls.append(1) or relay_reduce(*a))
    bench.compile_first(transport.open("local"), bench.Settings(("mxfp4",), routes=routes))
    assert len(calls) == num_calls


def test_no_tokens_at_all():
    report = measure(dataclasses.replace(SMALL, tokens=0), wires=("bf16", "mxfp4"))[0]
    assert [row.wire_bytes.total for row in report.rows] == [0] * 4
    assert report.num_wrong == 0


def test_the_time_holds_the_work(monkeypatch):  # BEN-08
    move = LocalTransport._move

    def slow(self, call):
        if call.shape.kind == "exchange" and self.rank == 1:
            time.sleep(0.02)
        move(self, call)

    monkeypatch.setattr(LocalTransport, "_move", slow)
    for row in measure(SMALL)[0].rows:
        assert row.time.median_us >= 20000
        assert row.parts_us["exchange"] >= 20000


def test_one_wrong_byte_in_what_arrives_is_noticed(one_wrong_byte, one_thread):
    also = ("round_trip", "overlap")
    report = measure(SMALL, wires=("bf16",), arrive="bf16", also=also)[0]
    assert [row.num_wrong > 0 for row in report.rows] == [True] * 4


def dispatched(workload, arrive, max_elements=None):
    """What rank 1 got of a dispatch, with its checker."""
    precision = Precision(dispatch="mxfp4")

    def on_rank(t):
        a2a = AllToAll(
            t,
            num_experts=workload.num_experts,
            hidden=workload.hidden,
            precision=precision,
            arrive=arrive,
            expert_alignment=50,
        )
        idx, weights = map(torch.from_numpy, workload.routing(t.rank))
        x = workload.rows(t.rank, np.arange(workload.tokens))
        d = a2a.dispatch(x, idx, weights)
        checker = Checker(workload, t.rank, arrive, 50, max_elements)
        y = a2a.combine(expert_outputs(d, checker.experts), d.handle)
        return d, y, checker

    return transport.run_local(2, on_rank)[1]


def flip(d, row):
    d.rows.view(torch.uint8)[row, 3] ^= 1


def swap(d, row):
    rows = d.rows.view(torch.uint8)
    rows[[row, row + 1]] = rows[[row + 1, row]]


def scale(d, row):
    d.scales[row, 0] *= 2


def weight(d, row):
    d.row_weights[row] += 0.25


FAULTS = [
    pytest.param(flip, 0, 1, id="one bit"),
    pytest.param(swap, 0, 2, id="two rows of one expert swapped"),
    pytest.param(scale, 0, 1, id="a scale"),
    pytest.param(weight, 0, 1, id="a weight"),
    pytest.param(flip, -1, 1, id="padding not empty"),
    pytest.param(scale, -1, 1, id="scale in padding"),
    pytest.param(weight, -1, 1, id="weight in padding"),
]


@pytest.mark.parametrize(("fault", "row", "num_wrong"), FAULTS)
def test_the_check_counts_wrong_rows(fault, row, num_wrong):
    d, _, checker = dispatched(SMALL, "fp8")
    wire = WireFormat("mxfp4")
    assert d.num_rows_list[-1] % 50, "the last row is padding"
    assert checker.dispatch(d, wire).num_wrong == 0
    fault(d, row)
    assert checker.dispatch(d, wire).num_wrong == num_wrong


def test_weights_and_padding_are_checked_outside_the_sample():
    d, y, checker = dispatched(SMALL, "fp8", max_elements=1)
    wire = WireFormat("mxfp4")
    checked = checker.dispatch(d, wire)
    assert 0 < checker.num_tokens_checked == 2
    assert 0 < checked.num_rows <= 6
    assert checked.num_wrong == 0
    for row in range(d.num_rows_list[0]):
        weight(d, row)
    assert checker.dispatch(d, wire).num_wrong == d.num_rows_list[0]
    assert checker.combine(y, wire, WireFormat("bf16")) == Checked(1, 0)


def test_rows_in_the_wrong_number_or_place_are_all_wrong():
    d, y, checker = dispatched(SMALL, "fp8")
    wire = WireFormat("mxfp4")
    counts = [d.num_rows_list[0] - 1, *d.num_rows_list[1:]]
    wrong = checker.dispatch(dataclasses.replace(d, num_rows_list=counts), wire)
    assert wrong.num_wrong == wrong.num_rows > 0
    wrong = checker.combine(y[:-1], wire, WireFormat("bf16"))
    assert wrong.num_wrong == wrong.num_rows == 40


def test_an_expert_that_did_anothers_work_is_noticed():
    d, y, checker = dispatched(SMALL, "bf16")
    wire, bf16 = WireFormat("mxfp4"), WireFormat("bf16")
    assert checker.combine(y, wire, bf16) == Checked(40, 0)
    y.view(torch.int16)[7, 0] ^= 1
    assert checker.combine(y, wire, bf16) == Checked(40, 1)
    others = range(checker.experts.start + 1, checker.experts.stop + 1)
    outs, moved = expert_outputs(d, checker.experts), expert_outputs(d, others)
    assert not torch.equal(outs, moved)


def test_the_sample_is_ascending_and_always_the_same():
    assert sample(5, 8).tolist() == [0, 1, 2, 3, 4]
    assert sample(0, 8).tolist() == []
    some = sample(1000, 8)
    assert len(set(some.tolist())) == 8
    assert (np.diff(some) > 0).all()
    assert np.array_equal(some, sample(1000, 8))
