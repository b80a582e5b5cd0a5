"""Routing on CUDA without a GPU: its launcher and kernels, run by g++ in emulated warps.

The kernels must leave what `fp4comm.routing.cpu` finds, byte for byte, whatever turns the lanes and
warps take, and touch nothing beyond their tensors, which the sanitizers watch.
"""

import contextlib
import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from fp4comm import cuda_kernels, routing
from fp4comm.routing import Placement, cpu, cuda

HERE = Path(__file__).resolve().parent
NUM_CASES = int(os.environ.get("FP4COMM_ROUTING_CASES", 150))  # of each random test
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
PLAN_FIELDS = ("send_splits", "expert_counts", "place_offsets", "places", "route")
RELAY_FIELDS = ("num_tokens", "place_offsets", "places", "row_tokens")
LAYOUT_FIELDS = ("slot_rows", "weights", "row_weights", "row_source")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The kernels, compiled by g++."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    path = tmp_path_factory.mktemp("cuda") / "warps"
    command = ["g++", "-std=c++17", "-O1", "-g", *SANITIZERS, f"-I{cuda_kernels.FOLDER}"]
    for header in ("cuda_shim.h", "cuda_warp.h"):
        command += ["-include", str(HERE / header)]
    subprocess.run([*command, "-o", str(path), str(HERE / "cuda_warp_host.cpp")], check=True)
    return path


class Warps:
    """A process that runs launches; see cuda_warp_host.cpp."""

    def __init__(self, program, errors):
        self.seed = 0  # of the order in which lanes and warps take turns
        self.errors = errors
        options = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
        self.process = subprocess.Popen(
            [program],
            env=os.environ | options,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors.open("w"),
        )

    def launch(self, name, options, grid, block, tensors, fields, *numbers):
        """Stand for `cuda_kernels.launch`, on tensors of the host."""
        assert block[1] == 1
        assert isinstance(tensors[0], torch.Tensor)
        given = [tensor for tensor in tensors if tensor is not None]
        assert all(tensor.is_contiguous() for tensor in given)
        if grid == 0:
            return
        self.seed += 1
        kernel = " ".join([name, *options]).encode()
        parts = [struct.pack("=i", len(kernel)), kernel]
        num_args = len(tensors) + len(numbers)
        parts += [struct.pack("=qiQi", grid, block[0], self.seed, num_args)]
        for tensor in tensors:
            if tensor is None:
                parts.append(b"n")
            else:
                parts += [struct.pack("=cq", b"t", tensor.nbytes), tensor.numpy().tobytes()]
        for letter, number in zip(fields, numbers, strict=True):
            kind = {"i": b"i", "q": b"l"}[letter]
            parts.append(struct.pack(f"=c{letter}", kind, number))
        try:
            self.process.stdin.write(b"".join(parts))
            self.process.stdin.flush()
        except BrokenPipeError:
            self.fail(kernel)
        for tensor in given:
            if tensor.nbytes:
                data = self.process.stdout.read(tensor.nbytes)
                if len(data) < tensor.nbytes:
                    self.fail(kernel)
                left = torch.frombuffer(bytearray(data), dtype=tensor.dtype)
                tensor.copy_(left.reshape(tensor.shape))

    def fail(self, kernel):
        self.process.wait(10)
        pytest.fail(f"{kernel.decode()}: {self.errors.read_text()[:4000]}")

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


class CopyOnHost:
    """Stands for `cuda.Copy`."""

    def __init__(self, tensor):
        self._copied = tensor.clone()

    def wait(self):
        return self._copied


@pytest.fixture
def warps(program, tmp_path, monkeypatch):
    """Have `routing.cuda` run in emulated warps."""
    running = Warps(program, tmp_path / "errors")
    monkeypatch.setattr(cuda_kernels, "launch", running.launch)
    monkeypatch.setattr(cuda, "Copy", CopyOnHost)
    yield running
    running.close()


def random_routing(rng, num_tokens, topk, num_experts):
    """Indices of one of several kinds, and weights or None."""
    shape = num_tokens, topk
    kind = rng.integers(7)
    if kind == 0:  # with duplicates and -1
        idx = rng.integers(-1, num_experts, shape)
    elif kind == 1 and topk <= num_experts:  # as a router chooses
        idx = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :topk]
    elif kind == 2:  # one expert in many, one token in many without any
        idx = np.repeat(rng.integers(-1, num_experts, (num_tokens, 1)), topk, axis=1)
    elif kind == 3:  # hot
        idx = np.minimum(rng.geometric(0.3, shape) - 2, num_experts - 1)
    elif kind == 4:
        idx = np.full(shape, rng.integers(-1, num_experts))
    elif kind == 5:  # by descending expert, so that rows of lower ranks come later
        idx = -np.sort(-rng.integers(-1, num_experts, shape), axis=1)
    else:  # mostly none
        idx = np.where(rng.random(shape) < 0.9, -1, rng.integers(0, num_experts, shape))
    idx = torch.from_numpy(np.ascontiguousarray(idx)).to(rng.choice([torch.int32, torch.int64]))
    if rng.random() < 0.3:
        return idx, None
    bits = rng.integers(0, 1 << 32, shape, dtype=np.uint32)  # NaN and all
    return idx, torch.from_numpy(bits.view(np.float32))


def random_shape(rng):
    """Tokens, top-k, experts, ranks: around whole chunks of tokens or slots, and whole words."""
    topk = int(rng.choice([1, 2, 3, 5, 6, 7, 8, 9, 16, 31, 32, 33, 40, 64, 65, 127, 128, 129]))
    chunk = int(rng.choice([cuda.CHUNK_SLOTS // topk, cuda.CHUNK_TOKENS]))
    num_tokens = max(0, int(rng.integers(0, 4) * chunk + rng.integers(-2, 3)))
    num_ranks = int(rng.choice([1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64, 65]))
    num_experts = int(rng.choice([1, 2, 3, num_ranks, 4 * num_ranks + 1, 8 * num_ranks, 256]))
    return num_tokens, topk, num_experts, num_ranks


def assert_same(got, want, fields):
    for field in fields:
        a, b = getattr(got, field), getattr(want, field)
        if a is None or b is None:
            assert a is b, field
            continue
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), field
        assert a.tobytes() == b.tobytes(), f"{field}:\n{a}\n{b}"


def same_plan(idx, weights, placement):
    want = cpu.plan(idx, weights, placement)
    assert_same(cuda.plan(idx, weights, placement), want, PLAN_FIELDS)
    np.testing.assert_array_equal(cuda.count(idx, placement), want.counts)
    return want


def same_relay(monkeypatch, *args):
    want, want_route = routing.relay(*args)
    with monkeypatch.context() as patch:
        patch.setattr(routing, "_of", lambda device: cuda)
        got, got_route = routing.relay(*args)
    assert_same(got, want, RELAY_FIELDS)
    assert torch.equal(got_route, want_route)


def same_layout(monkeypatch, *args):
    want = routing.expert_layout(*args)
    with monkeypatch.context() as patch:
        patch.setattr(routing, "_of", lambda device: cuda)
        got = routing.expert_layout(*args)
    assert_same(got, want, LAYOUT_FIELDS)


def test_plans_of_random_routings(warps):
    rng = np.random.default_rng(1)
    for _ in range(NUM_CASES):
        num_tokens, topk, num_experts, num_ranks = random_shape(rng)
        idx, weights = random_routing(rng, num_tokens, topk, num_experts)
        same_plan(idx, weights, Placement(num_experts, num_ranks))


def test_layouts_of_what_arrived(warps, monkeypatch):
    """Every rank's routing, planned and exchanged; then the layout on one rank."""
    rng = np.random.default_rng(2)
    for _ in range(NUM_CASES):
        num_tokens, topk, num_experts, num_ranks = random_shape(rng)
        num_ranks = min(num_ranks, 4)
        placement = Placement(num_experts, num_ranks)
        has_weights = rng.random() < 0.7
        plans = []
        for _ in range(num_ranks):
            idx, weights = random_routing(rng, num_tokens, topk, num_experts)
            weights = torch.rand(idx.shape) if has_weights else None
            plans.append(cpu.plan(idx, weights, placement))
        rank = int(rng.integers(num_ranks))
        firsts = [int(plan.send_splits[:rank].sum()) for plan in plans]
        counts = [int(plan.send_splits[rank]) for plan in plans]
        routes = [p.route[at:][:n] for p, at, n in zip(plans, firsts, counts, strict=True)]
        held = placement.num_local_experts(rank)
        num_rows = sum(plan.expert_counts[rank, :held] for plan in plans)
        alignment = int(rng.choice([1, 16, 128]))
        same_layout(monkeypatch, torch.cat(routes), topk, num_rows, alignment)


def test_what_a_relay_hands_on(warps, monkeypatch):
    """A route that came from a plan over nodes, planned again over the ranks of one of them."""
    rng = np.random.default_rng(5)
    for _ in range(NUM_CASES // 2):
        num_tokens, topk, num_experts, num_ranks = random_shape(rng)
        idx, weights = random_routing(rng, num_tokens, topk, num_experts)
        route = cpu.plan(idx, weights, Placement(num_experts, 1)).route
        placement = Placement(num_experts, num_ranks)
        rows = cpu.count(idx, placement)[:, 0]
        same_relay(monkeypatch, route, topk, placement, rows)


def same_chosen(chosen, num_topk):
    want, got = (m.chosen_experts(chosen, num_topk) for m in (cpu, cuda))
    for found, wanted in zip(got, want, strict=True):
        assert found.dtype == torch.int64
        assert torch.equal(found, wanted)
    return got


def test_experts_chosen_by_a_map(warps):
    rng = np.random.default_rng(6)
    for _ in range(NUM_CASES):
        num_tokens, topk, num_experts, _ = random_shape(rng)
        share = rng.choice([0.0, 0.5, 1.0, 2.0]) * topk / num_experts
        chosen = torch.from_numpy(rng.random((num_tokens, num_experts)) < share)
        found = [part.tolist() for part in same_chosen(chosen, topk)]
        for of_token, columns, has in zip(*found, chosen, strict=True):
            experts = has.nonzero()[:, 0].tolist()
            missing = topk - len(experts)
            assert columns == (experts + [0] * missing)[:topk]
            if missing < 0:
                assert of_token == [num_experts, *columns[1:]]
            else:
                assert of_token == experts + [-1] * missing


@pytest.mark.parametrize(("missing", "text"), [(0, None), (1, "heap-buffer-overflow")])
def test_an_access_beyond_a_tensor_is_noticed(warps, missing, text):
    """Of the tests themselves: 9 tokens on expert 2 of 3, and a cell too few."""
    route = torch.full((9, 1), 2, dtype=torch.int16).view(torch.uint8)
    cells = torch.zeros(3 - missing, dtype=torch.int32)
    filled = torch.ones(16), torch.ones(16, dtype=torch.int32)
    numbers = 9, 1, 2, 3, 1, 16
    arguments = (route, cells, *filled), "qiiiqq", *numbers
    if text is None:
        warps.launch("slot_counts", (), 1, (128, 1), *arguments)
        assert cells.tolist() == [0, 0, 9]
        assert [set(part.tolist()) for part in filled] == [{0.0}, {-1}]
        return
    with pytest.raises(pytest.fail.Exception, match=text):
        warps.launch("slot_counts", (), 1, (128, 1), *arguments)


def test_the_first_wrong_index_is_named(warps):
    rng = np.random.default_rng(3)
    wrong = [-2, -(2**31), 2**31 - 1]
    for _ in range(NUM_CASES // 3):
        num_tokens, topk, num_experts, num_ranks = random_shape(rng)
        if num_tokens == 0:
            continue
        idx, weights = random_routing(rng, num_tokens, topk, num_experts)
        far = [2**32, 2**32 - 1, 2**32 + 1, -(2**63), 2**63 - 1] * (idx.dtype == torch.int64)
        values = [*wrong, num_experts, num_experts + 1, *far]
        for at in rng.integers(idx.numel(), size=rng.integers(1, 5)):
            idx.view(-1)[at] = values[rng.integers(len(values))]
        texts = []
        for plan in (cpu.plan, cuda.plan):
            with pytest.raises(ValueError, match="topk_idx: expected values in") as raised:
                plan(idx, weights, Placement(num_experts, num_ranks))
            texts.append(str(raised.value))
        assert texts[0] == texts[1]


def test_a_route_of_garbage_leads_nowhere_else(warps):
    """After a stopped exchange the route is whatever the memory held: rows stay in range."""
    rng = np.random.default_rng(4)
    for _ in range(NUM_CASES):
        num_rows, topk = int(rng.integers(1, 70)), int(rng.integers(1, 50))
        num_experts, num_expert_rows = int(rng.integers(1, 40)), int(rng.integers(0, 300))
        slot_bytes = rng.choice([2, 6])
        route = rng.integers(0, 256, (num_rows, topk * slot_bytes), dtype=np.uint8)
        if rng.random() < 0.7:  # else hardly an expert is one
            experts = rng.integers(-2, num_experts + 2, (num_rows, topk)).astype(np.int16)
            route[:, : 2 * topk] = experts.view(np.uint8)
        shifts = torch.from_numpy(rng.integers(-400, 400, num_experts))
        filled = cuda.fill_layout(torch.from_numpy(route), topk, shifts, num_expert_rows)
        slot_rows, row_source = filled["slot_rows"].numpy(), filled["row_source"].numpy()
        assert ((slot_rows >= -1) & (slot_rows < num_expert_rows)).all()
        assert ((row_source >= -1) & (row_source < num_rows)).all()


def test_a_relay_of_garbage_leads_nowhere_else(warps, monkeypatch):
    """The counts say how many rows; the route is whatever the memory held."""
    rng = np.random.default_rng(6)
    monkeypatch.setattr(routing, "_of", lambda device: cuda)
    for _ in range(NUM_CASES):
        num_came, topk = int(rng.integers(1, 70)), int(rng.integers(1, 50))
        placement = Placement(int(rng.integers(1, 40)), int(rng.choice([1, 2, 3, 8, 33])))
        slot_bytes = rng.choice([2, 6])
        route = rng.integers(0, 256, (num_came, topk * slot_bytes), dtype=np.uint8)
        splits = rng.integers(0, rng.choice([1, 5, 200]), placement.num_ranks)
        kind = rng.integers(3)
        if kind > 0:  # else hardly an expert is one
            beyond = 2 * (kind == 1)
            experts = rng.integers(-1 - beyond, placement.num_experts + beyond, (num_came, topk))
            route[:, : 2 * topk] = experts.astype(np.int16).view(np.uint8)
        if kind == 2:  # a few rows more or less than were counted
            counted = cpu.count(torch.from_numpy(experts), placement)[:, 0]
            splits = (counted * rng.uniform(0.5, 1.2)).astype(np.int64)
        plan, handed = routing.relay(torch.from_numpy(route), topk, placement, splits)
        num_rows = int(splits.sum())
        assert len(plan.places) == len(plan.row_tokens) == len(handed) == num_rows
        assert ((plan.places >= 0) & (plan.places < max(num_rows, 1))).all()
        assert ((plan.row_tokens >= 0) & (plan.row_tokens < num_came)).all()
        assert (plan.place_offsets.diff() >= 0).all()
        assert plan.place_offsets[-1] <= num_rows


@pytest.mark.parametrize("topk", [1, 7, 8, 40])
def test_many_tokens_on_many_ranks(warps, monkeypatch, topk):
    rng = np.random.default_rng(topk)
    placement = Placement(100, 64)
    idx = torch.from_numpy(rng.integers(-1, 100, (1000 // topk, topk)))
    plan = same_plan(idx, torch.rand(idx.shape), placement)
    rank = 3
    first, count = int(plan.send_splits[:rank].sum()), plan.send_splits[rank]
    route = plan.route[first:][:count].contiguous()
    held = placement.num_local_experts(rank)
    same_layout(monkeypatch, route, topk, plan.expert_counts[rank, :held], 128)


def test_as_many_experts_on_a_rank_as_the_route_can_name(warps, monkeypatch):
    placement = Placement(32767, 1)
    idx = torch.tensor([[32766, 0, 32766, -1], [1, 32765, 2, 32766]])
    plan = same_plan(idx, None, placement)
    same_layout(monkeypatch, plan.route, 4, plan.expert_counts[0], 1)
