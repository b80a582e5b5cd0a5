"""Topologies, the time model, fp4comm plan and calibration."""

import dataclasses
import importlib.util
import itertools
import json

import numpy as np
import pytest
import ranks
from command_line import run

from fp4comm import hops, quantities, topology
from fp4comm.bench import kernels, meter
from fp4comm.bench.workload import Synthetic, distinct_experts, zipf_popularity
from fp4comm.formats import FORMATS, WireFormat
from fp4comm.predict import loads, spread, times
from fp4comm.predict.plan import Plan, Settings
from fp4comm.predict.times import Shape
from fp4comm.routing import Placement
from fp4comm.topology import Places, TopologyError

PRESET = topology.FOLDER / "hgx-h100-400g.toml"
BENCHMARKS = ranks.ROOT / "benchmarks"


def script(name):
    """Import a script of benchmarks/."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def edited(tmp_path):
    """Write a preset with one text in place of another."""
    (tmp_path / "codec").symlink_to(topology.FOLDER / "codec")

    def edit(old, new, count=-1):
        text = PRESET.read_text()
        assert old in text
        path = tmp_path / "edited.toml"
        path.write_text(text.replace(old, new, count))
        return path

    return edit


def simple(**changes):
    """Easy numbers: 100 GB/s local, 10 GB/s a NIC, kernels at 1000 GB/s, calls free."""
    found = dataclasses.replace(
        topology.load(PRESET),
        ranks=(4,),
        nics=4,
        memory_gbs=1000.0,
        local=topology.Link("local", 100.0, 0.0, 0.0),
        network=topology.Link("network", 10.0, 0.0, 0.0),
        calls=dict.fromkeys(topology.CALLS, 0.0),
        kernels={k: dict.fromkeys(FORMATS, 1.0) for k in topology.KERNELS},
    )
    return dataclasses.replace(found, **changes)


# Reading


@pytest.mark.parametrize("name", topology.presets())
def test_every_preset_reads_and_names_a_source_for_each_number(name):
    found = topology.load(name)
    assert found.name == name
    assert all(len(source) > 5 for source in found.sources.values())
    assert set(found.sources) == {*topology.SCHEMA, *topology.CODEC_SCHEMA}
    assert found.places(1).num_ranks == found.ranks[0]


def test_presets_are_there():
    wanted = {"hgx-h100-400g", "hgx-h200-400g", "dgx-a100", "gb200-nvl72"}
    wanted |= {"pcie-l40s-100g", "pcie-h100-200g", "cpu-1g", "cpu-10g", "cpu-25g"}
    assert wanted == set(topology.presets())


@pytest.mark.parametrize(
    ("text", "gbs"),
    [("400 Gbit/s", 50.0), ("26.6 GB/s", 26.6), ("1Tbit/s", 125.0), ("250 MB/s", 0.25)],
)
def test_bandwidths(text, gbs):
    assert quantities.BANDWIDTH.parse(text) == pytest.approx(gbs)


@pytest.mark.parametrize(("text", "us"), [("5 us", 5.0), ("300 ns", 0.3), ("1.5ms", 1500.0)])
def test_times(text, us):
    assert quantities.TIME.parse(text) == pytest.approx(us)


@pytest.mark.parametrize(
    "text", ["400", "400 Gb/s", "400 GBit/s", "-1 GB/s", "0 GB/s", "1.2.3 GB/s", 5, "5 us"]
)
def test_bandwidths_that_are_refused(text):
    assert quantities.BANDWIDTH.parse(text) is None


CODEC = 'codec = "codec/h200.toml"'
MISTAKES = [
    ('"400 Gbit/s"', '"400 Gb/s"', "network.bandwidth.value: expected a bandwidth in"),
    ('"10 us"', '"10 minutes"', "network.latency.value: expected a time in ns"),
    ("value = 0.96", "value = 96", "network.reached.value: expected a number in 1e-06..2"),
    ("value = 8,", "value = 8.5,", "node.ranks.value: expected a whole"),
    ("[memory]", "[memori]", "memori.bandwidth: expected a known key, such as memory.bandwidth"),
    ("latency = ", "latencies = ", "local.latencies: expected a known key, such as local.latency"),
    ("{ value = 8,", "{ values = 8,", "node.ranks.values: expected one of value, source"),
    ('device = "cuda"', 'device = "gpu"', "device: expected one of cpu, cuda, got 'gpu'"),
    ('name = "NVLink 4"\n', "", "local.name: expected a text, got nothing"),
    (CODEC, 'codec = "none.toml"', "none.toml: expected a topology"),
    (CODEC, "", "calls.plan: expected { value"),
    ("[node]", "[node", "expected TOML"),
    ("nics = {", "# nics = {", "node.nics: expected { value"),
]


@pytest.mark.parametrize(("old", "new", "text"), MISTAKES)
def test_mistakes_name_file_and_key(edited, old, new, text):
    path = edited(old, new, 1)
    with pytest.raises(TopologyError) as raised:
        topology.load(path)
    assert text in str(raised.value)
    assert str(path.parent) in str(raised.value)
    result = run("plan", "--topology", path)
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1


def test_a_number_without_a_source_is_refused(edited):
    path = edited('source = "NVIDIA/nccl-tests issue 267: 48 to 49 GB/s of 50"', 'source = " "')
    with pytest.raises(TopologyError, match=r"network.reached.source: expected where"):
        topology.load(path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--topology", "a\0b"], "got 'a\\x00b'"),
        (["--topology", "a\0b.toml"], "'a\\x00b.toml': expected a topology, got none"),
        (["--topology", PRESET, "--skew", "40"], "skew: expected a number in 0..10 or"),
        (["--topology", PRESET, "--skew", "1e308"], "skew: expected a number in 0..10 or"),
        (["--topology", PRESET, "--experts", 262137],
         "experts: expected at most 32767 a rank (8 ranks), got 262137"),
        (["--topology", "gb200-nvl72", "--experts", 262145, "--skew", 1],
         "experts: expected at most 262144 with a skew or node-limit"),
        (["--topology", PRESET, "--tokens", 10**30], "tokens: expected at most 2147483647"),
        (["--topology", "nope"], "topology: expected a TOML file or one of cpu-10g"),
        (["--topology", "nope.toml"], "nope.toml: expected a topology, got none"),
        (["--topology", "cpu-1g", "--nodes", 2049], "nodes: expected 1..2048 (topology cpu-1g)"),
        (["--topology", PRESET, "--ranks-per-node", 9], "ranks-per-node: expected 1..8"),
        (["--topology", PRESET, "--nodes", 0], "nodes: expected 1..2048"),
        (["--topology", PRESET, "--hidden", 33], "hidden: expected a multiple of 32"),
        (["--topology", PRESET, "--topk", 300], "topk: expected at most 256"),
        (["--topology", PRESET, "--wire", "fp3"], "wire: expected one of bf16"),
        (["--topology", PRESET, "--skew", "x"], "skew: expected a number"),
        (["--topology", PRESET, "--routing", "nope.npy"], "routing: expected a .npy"),
        (["--topology", PRESET, "--nodes", 9, "--skew", "balanced", "--node-limit", 4],
         "node-limit: expected none with skew balanced"),
        (["--topology", PRESET, "--tokens", 0], "0 is not in the range"),
        (["--topology", PRESET, "--nodes", 256, "--node-limit", 1, "--experts", 64, "--topk", 9],
         "node-limit: expected at least 9 experts"),
    ],
)  # fmt: skip
def test_plan_refuses(options, text):
    result = run("plan", *options)
    assert result.exit_code == 2
    assert text in result.output


def test_a_list_of_ranks_names_all_nodes():
    found = dataclasses.replace(topology.load(PRESET), ranks=(4, 2), most_nodes=2)
    assert found.places().sizes.tolist() == [4, 2]


EXTREMES = [
    ("nics = { value = 8", f"nics = {{ value = {9 * 10**18}", "node.nics.value: expected a whole"),
    ("nics = { value = 8", "nics = { value = 1000000", "node.nics.value: expected a whole number"),
    (
        "ranks = { value = 8",
        f"ranks = {{ value = {2**63 - 1}",
        "node.ranks.value: expected a whole",
    ),
    (
        "value = 8,",
        f"value = [8, {2**63 - 1}],",
        "node.ranks.value: expected a whole number in 1..",
    ),
    ("value = 8,", f"value = {'9' * 5000},", "expected TOML, got a mistake: Exceeds the limit"),
    ("value = 8,", f"value = {'[' * 5000}{']' * 5000},", "expected TOML, got a mistake: maximum"),
    (
        "most = { value = 2048",
        f"most = {{ value = {2**63 - 1}",
        "node.most.value: expected a whole",
    ),
    ('"400 Gbit/s"', '"1e-320 Gbit/s"', "network.bandwidth.value: expected a bandwidth in"),
    ('"400 Gbit/s"', '"1e300 Gbit/s"', "network.bandwidth.value: expected a bandwidth in"),
    ("value = 0.96", "value = 5e-324", "network.reached.value: expected a number in"),
    ('"10 us"', '"1e300 us"', "network.latency.value: expected a time in"),
    (CODEC, 'codec = "a\\u0000b.toml"', "edited.toml: codec: '"),
    (CODEC, 'codec = "."', "codec: "),
]


@pytest.mark.parametrize(("old", "new", "text"), EXTREMES, ids=lambda text: text[:30])
@pytest.mark.filterwarnings("error")
def test_numbers_and_names_that_cannot_be_are_refused(edited, old, new, text):
    result = run("plan", "--topology", edited(old, new, 1), "--nodes", 2)
    assert result.exit_code == 2, result.output
    assert text in result.output
    assert "edited.toml: " in result.output
    assert result.output.count("\n") == 1


@pytest.mark.filterwarnings("error")
def test_the_most_nics_cost_no_more_than_one_for_each_rank(edited):
    most = edited("nics = { value = 8", f"nics = {{ value = {topology.MOST_RANKS}")
    places = topology.load(most).places(2048)
    assert places.nic.tolist() == list(range(topology.MOST_RANKS))


def test_ranks_share_nics_in_order():
    places = Places(np.array([4, 2]), 2)
    assert places.nic.tolist() == [0, 0, 1, 1, 2, 3]
    found = topology.load(PRESET)
    assert [found.places(2, n).nics for n in (8, 3, 1)] == [8, 3, 1]
    assert [dataclasses.replace(found, nics=2).places(2, n).nics for n in (8, 3, 1)] == [2, 1, 1]
    assert Places(np.array([2]), 4).nics_a_rank.tolist() == [2, 2]
    assert places.index.tolist() == [0, 1, 2, 3, 0, 1]


# Where tokens go


def test_uniform_spread_is_the_closed_form_of_what_is_drawn():
    places = Places(np.array([4, 2]), 1)
    placement = Placement(20, 6)
    idx = distinct_experts(40000, 4, np.full(20, 1 / 20), np.random.default_rng(0))
    got, want = spread.uniform(4, placement, places), spread.of_experts(idx, placement, places, "")
    for name in ("rank_rows", "node_rows", "slots"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=0.01)
    assert got.slots.sum() == pytest.approx(4)


def test_a_skewed_spread_is_that_of_the_benchmark():
    places, work = Places(np.array([2, 2]), 1), Synthetic(4, 1, 32, 16, 4, 1.0, seed=3)
    idx = distinct_experts(40000, 4, zipf_popularity(16, 1.0, 3), np.random.default_rng(1))
    want = spread.of_experts(idx, Placement(16, 4), places, "")
    got = spread.synthetic(work, places, None)
    np.testing.assert_allclose(got.rank_rows, want.rank_rows, atol=0.015)
    np.testing.assert_allclose(got.slots, want.slots, atol=0.03)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("node_limit", [None, 2])
def test_the_greatest_skew_of_many_experts_sends_all_tokens_to_the_same(node_limit):
    places, work = Places(np.full(4, 4), 4), Synthetic(16, 1, 32, 16384, 4, 10.0, seed=1)
    got = spread.synthetic(work, places, node_limit)
    popular = np.argsort(-zipf_popularity(16384, 10.0, 1))[:4]
    if node_limit is None:
        want = spread.of_experts(popular[None], Placement(16384, 16), places, "")
        np.testing.assert_allclose(got.slots, want.slots, atol=0.15)
    assert got.slots[Placement(16384, 16).owners[popular[0]]] >= 1
    assert got.slots.sum() == pytest.approx(4)
    assert got.node_rows.sum() <= (node_limit or 4)


def test_a_token_is_on_no_more_nodes_than_it_may():
    places = Places(np.full(8, 8), 8)
    got = spread.synthetic(Synthetic(64, 1, 32, 256, 8), places, 4)
    assert 3.5 < got.node_rows.sum() <= 4
    assert got.slots.sum() == pytest.approx(8)
    free = spread.synthetic(Synthetic(64, 1, 32, 256, 8), places, None)
    assert free.node_rows.sum() == pytest.approx(8 * (1 - 0.338), abs=0.02)


def test_spread_of_known_experts():
    """Experts 0 1 | 2 3 | 4 5 | 6 7 on four ranks, two a node; -1 goes nowhere."""
    idx = np.array([[0, 1], [0, 2], [6, -1], [-1, -1]])
    got = spread.of_experts(idx, Placement(8, 4), Places(np.array([2, 2]), 1), "")
    assert got.rank_rows.tolist() == [0.5, 0.25, 0, 0.25]
    assert got.node_rows.tolist() == [0.5, 0.25]
    assert got.slots.tolist() == [0.75, 0.25, 0, 0.25]


def test_padding_of_expert_segments():
    """Two experts a rank; of 1000 tokens in all each expert gets 250, of 2 less than one row."""
    rows = spread.uniform(1, Placement(4, 2), Places(np.array([2]), 1))
    assert rows.padded_rows(1000, 128) == pytest.approx([2 * (250 + 63.5)] * 2)
    assert rows.padded_rows(100, 128) == pytest.approx([2 * 128] * 2)
    assert rows.padded_rows(0, 128).tolist() == [0, 0]
    assert rows.padded_rows(1000, 1) == pytest.approx([500] * 2)


def test_balanced_goes_evenly():
    got = spread.synthetic(Synthetic(16, 1, 32, 128, 4, "balanced"), Places(np.full(4, 4), 1), None)
    np.testing.assert_allclose(got.slots, 0.25)


def test_links_of_a_topology_are_what_auto_takes():
    """The default is the preset's; two ranks that share a NIC have half of it each."""
    assert topology.load(PRESET).links == hops.Links()
    shared = simple(nics=2, calls=dict.fromkeys(topology.CALLS, 7.0)).links
    assert shared == hops.Links(inside_gbs=100.0, between_gbs=5.0, hop_us=7.0)


# Rows over links


def brute_force(tokens_of, placement, places):
    """Count rows one by one: flat, and by relay; matrices of source, destination."""
    n = places.num_ranks
    flat, across, inside = (np.zeros((n, n)) for _ in range(3))
    first = np.cumsum(places.sizes) - places.sizes
    for source, idx in enumerate(tokens_of):
        for token in idx:
            to = sorted({int(placement.owners[e]) for e in token})
            for rank in to:
                flat[source, rank] += 1
            for node in sorted({int(places.node[rank]) for rank in to}):
                own = [rank for rank in to if places.node[rank] == node]
                relay = first[node] + places.index[source] % places.sizes[node]
                across[source, relay] += 1
                inside[relay, own] += 1
    return flat, across, inside


@pytest.mark.parametrize("sizes", [[2, 2], [3, 3, 3], [4, 2], [1, 3, 2], [4]])
def test_loads_are_those_of_rows_counted_one_by_one(sizes):
    places = Places(np.array(sizes), 1)
    n, placement = places.num_ranks, Placement(24, places.num_ranks)
    idx = distinct_experts(50, 3, zipf_popularity(24, 0.7, 0), np.random.default_rng(2))
    found = spread.of_experts(idx, placement, places, "")
    flat, across, inside = brute_force([idx] * n, placement, places)
    is_far = places.node[:, None] != places.node[None, :]
    pairs = [(loads.flat(50, found.rank_rows, places), flat)]
    pairs += zip(loads.two_hop(50, found, places), (across, inside), strict=True)
    for load, rows in pairs:
        others = rows.copy()
        np.fill_diagonal(others, 0)
        for name, want in (
            ("own", np.diagonal(rows)),
            ("net_out", (rows * is_far).sum(1)),
            ("net_in", (rows * is_far).sum(0)),
            ("local_out", (others * ~is_far).sum(1)),
            ("local_in", (others * ~is_far).sum(0)),
        ):
            np.testing.assert_allclose(getattr(load, name), want, atol=1e-9, err_msg=name)
        most = np.maximum((others > 0).sum(1), (others > 0).sum(0))
        peers = load.local_peers + load.net_peers
        assert (peers <= most + 1e-9).all()


def test_relays_of_uneven_nodes():
    """Nodes of 2 and 3: both of the first relay for 2 and 1 of the other node's three."""
    assert loads.sources_of_relays(Places(np.array([2, 3]), 1)).tolist() == [2, 1, 1, 1, 0]


# Times


def exchange_us(places, load, **changes):
    return times.exchange(simple(**changes), places, load, 1000).us


def test_an_exchange_takes_as_long_as_its_fullest_link():
    """1000 rows of 1000 B each to 8 ranks on 2 nodes of 4: 3 local, 4 across, 1 to oneself."""
    places = Places(np.array([4, 4]), 4)
    load = loads.flat(8000, np.full(8, 1 / 8), places)
    assert exchange_us(places, load) == pytest.approx(4e6 / 10e3)  # 4 MB at 10 GB/s
    shared = Places(np.array([4, 4]), 1)  # one NIC for four ranks
    assert exchange_us(shared, load) == pytest.approx(4 * 4e6 / 10e3)
    assert exchange_us(places, load, half_duplex=True) == pytest.approx(2 * 4e6 / 10e3)
    slow = topology.Link("PCIe", 5.0, 0.0, 0.0)
    assert exchange_us(places, load, local=slow) == pytest.approx(3e6 / 5e3)
    both = exchange_us(places, load, local=slow, carries_network=True)
    assert both == pytest.approx(7e6 / 5e3)


def test_latency_and_messages_are_counted():
    places = Places(np.array([4, 4]), 4)
    load = loads.flat(8000, np.full(8, 1 / 8), places)
    local, network = topology.Link("l", 1e9, 1.0, 0.5), topology.Link("n", 1e9, 7.0, 2.0)
    found = simple(local=local, network=network)
    hop = times.exchange(found, places, load, 1, streams=3)
    assert hop.us == pytest.approx(7 + 3 * (3 * 0.5 + 4 * 2), abs=0.01)
    assert hop.link == "messages"


def test_parts_of_a_dispatch():
    """Two ranks on a node, one token each, both with an expert on both ranks; 4 GB/s of memory."""
    found = simple(ranks=(2,), memory_gbs=4.0)
    places = Places(np.array([2]), 1)
    rows = spread.of_experts(np.array([[0, 2]]), Placement(4, 2), places, "")
    got = times.dispatch(found, places, rows, Shape(1000, 128, 2, 1), WireFormat("mxfp4"))
    row = 64 + 4
    assert got.parts_us["quantize"] == pytest.approx(1000 * (256 + 2 * row) / 4e3)
    assert got.parts_us["exchange"] == pytest.approx(1000 * (row + 12) / 100e3)
    assert got.parts_us["arrive"] == pytest.approx(2000 * (row + 132) / 4e3)
    back = times.combine(found, places, rows, Shape(1000, 128, 2), WireFormat("bf16"))
    reduce = 2000 * (256 + 256) + 2000 * 256 + 1000 * 256
    assert back.parts_us["reduce"] == pytest.approx(reduce / 4e3)


def test_two_hops_save_network_bytes_and_nothing_within_a_node():
    found, shape = topology.load(PRESET), Shape(4096, 7168, 8)
    for nodes, routes in ((8, ("flat", "two_hop")), (1, ("flat",))):
        places = found.places(nodes)
        rows = spread.uniform(8, Placement(256, places.num_ranks), places)
        plan = Plan(found, places, rows, shape, 256, Settings(("bf16", "mxfp4")))
        assert plan.routes == routes
        by_route = {r.route: r for r in plan.rows() if (r.op, r.format) == ("dispatch", "mxfp4")}
        assert tuple(by_route) == routes
        if nodes > 1:
            bytes_ = {route: row.net_bytes for route, row in by_route.items()}
            saved = rows.node_rows.sum() / rows.rank_rows.sum()
            assert bytes_["two_hop"] / bytes_["flat"] == pytest.approx(saved)


def test_fp4_does_not_pay_where_calls_take_all_the_time():
    found = topology.load(PRESET)
    places = found.places(1)
    rows = spread.uniform(8, Placement(256, 8), places)
    plan = Plan(found, places, rows, Shape(1, 7168, 8), 256, Settings(("bf16", "fp8", "mxfp4")))
    assert plan.gain("bf16") < 1.05
    assert 1 < plan.pays_from("bf16") < plan.pays_from("fp8")


def test_sixteen_thousand_ranks():
    found = topology.load(PRESET)
    places = found.places(2048)
    for skew, limit in ((0.0, None), (1.0, None), (0.0, 4)):
        rows = spread.synthetic(Synthetic(16384, 4096, 7168, 16384, 8, skew), places, limit)
        assert rows.slots.sum() == pytest.approx(8)
        plan = Plan(found, places, rows, Shape(4096, 7168, 8), 256, Settings(("mxfp4",)))
        assert len(plan.rows()) == 5


# The command


def test_plan_prints_a_table_and_writes_json(tmp_path):
    file = tmp_path / "plan.json"
    result = run(
        *("plan", "--topology", "hgx-h100-400g", "--nodes", 8, "--tokens", 4096, "--hidden", 7168),
        *("--experts", 256, "--topk", 8, "--json", file),
    )
    assert result.exit_code == 0, result.output
    assert "64 ranks, nodes: 8 of 8" in result.output
    assert "mxfp4: two_hop is the faster route" in result.output
    assert "mxfp4 pays against bf16" in result.output
    content = json.loads(file.read_text())
    names = [(row["op"], row["format"], row["route"]) for row in content["rows"]]
    routes = ("flat", "two_hop")
    assert names == [
        ("plain", "bf16", "flat"),
        *(("dispatch", wire, route) for wire, route in itertools.product(FORMATS, routes)),
        *(("combine", "bf16", route) for route in routes),
    ]
    assert content["ranks"] == 64
    assert content["fp4"]["fp8"]["pays"] is True
    assert "NVIDIA" in content["sources"]["network.bandwidth"]
    assert max(len(line) for line in result.output.splitlines()) <= 160


def test_plan_says_when_fp4_does_not_pay():
    result = run("plan", "--topology", "gb200-nvl72", "--tokens", 16, "--experts", 288)
    assert result.exit_code == 0, result.output
    assert "mxfp4 does NOT pay against fp8" in result.output
    assert "two_hop" not in result.output


def test_plan_takes_recorded_routing(tmp_path):
    data = ranks.ROOT / "tests" / "data" / "layer0.safetensors"
    result = run("plan", "--topology", "cpu-1g", "--nodes", 4, "--ranks-per-node", 1,
                 "--routing", data, "--hidden", 1024, "--tokens", 768)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "routing layer0.safetensors" in result.output
    file = tmp_path / "topk.npy"
    np.save(file, np.array([[0, 9], [3, -1]]))
    result = run("plan", "--topology", "cpu-1g", "--routing", file, "--experts", 8)
    assert result.exit_code == 2
    assert "topk.npy: expected values in -1..7 (8 experts), got 9" in result.output
    np.save(file, np.ones((3, 2)))
    result = run("plan", "--topology", "cpu-1g", "--routing", file)
    assert "expected topk_idx of integers [T, K], got float64 [3, 2]" in result.output
    for expert, dtype in ((40000, "i8"), (2**40, "i8"), (2**64 - 1, "u8")):
        np.save(file, np.array([[0, expert]], dtype))
        result = run("plan", "--topology", "cpu-1g", "--routing", file, "--ranks-per-node", 1)
        assert result.exit_code == 2
        assert f"got {expert + (expert == 40000)}\n" in result.output
    result = run("plan", "--topology", "cpu-1g", "--routing", data, "--skew", "1")
    assert "skew: expected none with this routing, got 1" in result.output


# Figures that are written down


def test_codec_files_are_those_of_the_results():
    shares = script("codec_shares")
    for name, (title, numbers) in shares.FILES.items():
        text = (topology.FOLDER / "codec" / name).read_text()
        assert text == shares.as_toml(title, numbers()), "run benchmarks/codec_shares.py"


def test_the_tables_against_published_figures_are_current():
    published = script("plan_against_published")
    readme = published.README.read_text()
    assert published.tables() in readme, "run benchmarks/plan_against_published.py --write"


def test_the_readme_shows_what_plan_prints():
    found = script("plan_against_published").PLAN.search((ranks.ROOT / "README.md").read_text())
    result = run(*found["command"].split()[1:])
    assert result.output == found["printed"], "run benchmarks/plan_against_published.py --write"


# Calibration


def test_every_pair_meets_once():
    for n in (2, 3, 4, 7, 8):
        met = [frozenset(pair) for round_ in meter.rounds(n) for pair in round_]
        assert sorted(map(sorted, met)) == sorted(map(list, itertools.combinations(range(n), 2)))
        for round_ in meter.rounds(n):
            assert len(set(itertools.chain(*round_))) == 2 * len(round_)


def test_calibrate_writes_a_topology_that_plan_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(meter, "TARGET_S", 0.002)
    monkeypatch.setattr(meter, "PAIR_TARGET_S", 0.002)
    monkeypatch.setattr(meter, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(kernels, "TOKENS", {"cpu": (8, 64)})
    monkeypatch.setattr(meter, "REPEATS", 1)
    monkeypatch.setattr(kernels, "REPEATS", 1)
    file = tmp_path / "here.toml"
    result = run("bench", "--calibrate", file, "--ranks", 2)
    assert result.exit_code == 0, result.output
    assert "# local: " in result.output
    found = topology.load(file)
    assert found.ranks == (2,)
    assert found.most_nodes == 1
    assert found.links.hop_us == found.local.latency_us  # where calls.exchange is counted
    assert all("measured" in s or "latency" in s for s in found.sources.values())
    planned = run("plan", "--topology", file, "--tokens", 64, "--experts", 16, "--hidden", 256)
    assert planned.exit_code == 0, planned.output
    assert "2 ranks, nodes: 1 of 2" in planned.output
    refused = run("plan", "--topology", file, "--nodes", 2)
    assert "nodes: expected 1..1 (topology here), got 2" in refused.output


def test_calibrate_refuses():
    result = run("bench", "--calibrate", "x.toml", "--tokens", 4)
    assert result.exit_code == 2
    assert "calibrate: expected without --tokens" in result.output
    result = run("bench", "--calibrate", "x.json")
    assert "calibrate: expected a file NAME.toml, got x.json" in result.output
    result = run("bench", "--calibrate", "x.toml", "--ranks", 1)
    assert result.exit_code == 2
    assert "calibrate: expected at least 2 ranks, got 1" in result.output
