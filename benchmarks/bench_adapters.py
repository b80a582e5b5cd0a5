"""What an adapter adds to the time of AllToAll, and to its memory: the same rows by both.

    torchrun --nproc-per-node 2 benchmarks/bench_adapters.py [--device cpu] [--json FILE]

Each adapter whose framework is installed sends the same tokens as `AllToAll` alone does, to experts
that change nothing (Transformers': the model's own, on both sides), forward and, where it trains,
backward.  `added` is the median of an adapter's time less the median of the other's, measured in
turns, as a share of what dispatch and combine take.  `peak` is memory of torch's allocator beyond
what was there before; one that copied the rows would add `rows` to it.

Exit code: 0; 1 if results differ; 2 where nothing can be measured.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
import torch.distributed as dist

from fp4comm import AllToAll, Precision, launch, machine
from fp4comm.bench import report as bench_report
from fp4comm.bench.clock import Stopwatch, gather
from fp4comm.integrations._common import transport_of
from fp4comm.transport import Transport

WARMUP = 5
INNER = 64  # of Transformers' experts
NUM_TRANSFORMERS_EXPERTS = 16  # a rank: all of a model are made first


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Tokens of this rank."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    num_experts: int


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same by an adapter and by `AllToAll` alone; each makes y of x and topk_weights."""

    adapter: str
    package: str
    a2a: AllToAll
    inputs: Inputs
    through: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    alone: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Row:
    """Medians of the slowest rank in us, peaks of the highest in bytes."""

    adapter: str
    release: str
    passes: str
    dispatch_combine_us: float
    alone_us: float
    through_us: float
    added: float
    alone_peak: int
    through_peak: int
    rows_bytes: int
    num_wrong: int


def inputs_of(rank: int, tokens: int, hidden: int, num_experts: int, topk: int) -> Inputs:
    """Draw tokens and routing; weights are powers of two, so that sums are exact in any order."""
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    idx = torch.rand(tokens, num_experts, generator=g).topk(topk).indices.sort().values
    weights = torch.exp2(torch.randint(-3, 1, idx.shape, generator=g).float())
    return Inputs(x, idx, weights, num_experts)


def megatron(group: Any, inputs: Inputs, **options: Any) -> Pair:
    """Megatron-Core's hooks, in the order in which a MoELayer calls them."""
    from fp4comm.integrations.megatron import TokenDispatcher

    a2a = AllToAll(transport_of(group), arrive="bf16", expert_alignment=1, **options)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    replaced = SimpleNamespace(
        config=SimpleNamespace(moe_router_topk=inputs.topk_idx.shape[1]),
        ep_group=group,
        tp_group=alone,
        tp_ep_group=group,
    )
    dispatcher: Any = TokenDispatcher(replaced, a2a)
    shape = len(inputs.x), inputs.num_experts
    chosen = torch.zeros(shape, dtype=torch.bool, device=inputs.x.device)
    chosen.scatter_(1, inputs.topk_idx, True)

    def through(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # The router's; to make it is no work of a dispatcher.
        rows, probs = dispatcher.dispatch_preprocess(x, chosen, router(weights))
        rows, probs = dispatcher.token_dispatch(rows, probs)
        rows, _, _ = dispatcher.dispatch_postprocess(rows, probs)
        y = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        return dispatcher.combine_postprocess(y)

    def by_itself(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        router(weights)
        d = a2a.dispatch(x, inputs.topk_idx, weights)
        return a2a.combine(d.rows, d.handle, weighted=False)

    def router(weights: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(shape, device=weights.device)
        return zeros.scatter(1, inputs.topk_idx, weights)

    return Pair("Megatron-Core", "megatron-core", a2a, inputs, through, by_itself)


def torchtitan(group: Any, inputs: Inputs, **options: Any) -> Pair:
    """torchtitan's dispatcher, as its MoE block calls it."""
    from torch.distributed.device_mesh import DeviceMesh

    from fp4comm.integrations.torchtitan import TokenDispatcher

    config = TokenDispatcher.Config(
        top_k=inputs.topk_idx.shape[1],
        **{name: options.pop(name) for name in ("num_experts", "hidden", "precision")},
        options=options,
    )
    dispatcher = TokenDispatcher(config)
    dispatcher.wire_meshes(ep_mesh=DeviceMesh.from_group(group, inputs.x.device.type))
    a2a = dispatcher.a2a
    of_experts = torch.bincount(inputs.topk_idx.flatten(), minlength=inputs.num_experts)

    def through(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, _, handle = dispatcher.dispatch(x, weights, inputs.topk_idx, of_experts)
        assert rows is not None
        return dispatcher.combine(rows, handle, x)

    def by_itself(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = a2a.dispatch(x, inputs.topk_idx, weights)
        return a2a.combine(d.rows, d.handle)

    return Pair("torchtitan", "torchtitan", a2a, inputs, through, by_itself)


def transformers(group: Any, inputs: Inputs, **options: Any) -> Pair:
    """Transformers' experts function, around the experts of a Mixtral layer."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from fp4comm.integrations import transformers as adapter

    num_experts = NUM_TRANSFORMERS_EXPERTS * dist.get_world_size(group)
    config = MixtralConfig(
        hidden_size=options["hidden"], intermediate_size=INNER, num_local_experts=num_experts
    )
    torch.manual_seed(1)
    experts = MixtralExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model = torch.nn.ModuleList([experts.to(inputs.x.device, torch.bfloat16)])
    adapter.shard_experts(model, group, options["precision"])
    a2a, idx = experts._fp4comm, inputs.topk_idx % num_experts

    def through(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return experts(x, idx, weights)

    def by_itself(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = a2a.dispatch(x, idx, weights)
        return a2a.combine(adapter.apply_experts(experts, d), d.handle)

    of_pair = dataclasses.replace(inputs, topk_idx=idx, num_experts=num_experts)
    return Pair("Transformers", "transformers", a2a, of_pair, through, by_itself)


ADAPTERS: dict[str, Callable[..., Pair]] = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "transformers": transformers,
}


def measure(pair: Pair, transport: Transport, trains: bool, iterations: int) -> Row:
    """Compare both results, and measure both in turns."""
    x, weights = pair.inputs.x, pair.inputs.topk_weights
    watch = Stopwatch(transport, x.device.type)

    def step(call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        with torch.set_grad_enabled(trains):
            leaves = [t.detach().requires_grad_(trains) for t in (x, weights)]
            y = call(*leaves)
            if not trains:
                return [y]
            y.backward(torch.ones_like(y))
            return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def alone(*leaves: torch.Tensor) -> torch.Tensor:
        d = pair.a2a.dispatch(leaves[0], pair.inputs.topk_idx, leaves[1])
        return pair.a2a.combine(d.rows, d.handle)

    calls = {"alone": pair.alone, "through": pair.through, "dispatch_combine": alone}
    steps = {name: functools.partial(step, call) for name, call in calls.items()}
    got, wanted = steps["through"](), steps["alone"]()
    num_wrong = sum(not torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    del got, wanted
    peaks = {name: peak(of_step, x.device) for name, of_step in steps.items()}
    times: dict[str, list[int]] = {name: [] for name in calls}
    for i in range(WARMUP + iterations):
        for name, of_step in steps.items():
            _, ns = watch.time(of_step)
            if i >= WARMUP:
                times[name].append(ns)
    slowest = gather(transport, [round(statistics.median(t)) for t in times.values()]).max(0)
    us = dict(zip(times, (slowest / 1e3).tolist(), strict=True))
    most = gather(transport, [*peaks.values(), num_wrong]).max(0)
    highest = dict(zip(peaks, most[:-1].tolist(), strict=True))
    return Row(
        adapter=pair.adapter,
        release=importlib.metadata.version(pair.package),
        passes="forward and backward" if trains else "forward",
        dispatch_combine_us=us["dispatch_combine"],
        alone_us=us["alone"],
        through_us=us["through"],
        added=(us["through"] - us["alone"]) / us["dispatch_combine"],
        alone_peak=highest["alone"],
        through_peak=highest["through"],
        rows_bytes=x.numel() * x.element_size(),
        num_wrong=int(most[-1]),
    )


def peak(call: Callable[[], Any], device: torch.device) -> int:
    """Bytes that a call takes at most beyond what was there before; 0 on the CPU."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def lines(rows: list[Row]) -> Iterator[str]:
    """Write the rows."""
    names = "adapter", "passes", "disp+comb us", "alone us", "through us"
    widths = 14, 20, 12, 10, 10
    head = " ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    yield f"#{head}   added   peak MB alone  through    rows  #wrong"
    for row in rows:
        us = row.dispatch_combine_us, row.alone_us, row.through_us
        times = " ".join(f"{t:{width}.0f}" for t, width in zip(us, widths[2:], strict=True))
        sizes = (b / 1e6 for b in (row.alone_peak, row.through_peak, row.rows_bytes))
        memory = "{:15.1f} {:8.1f} {:7.1f}".format(*sizes)
        yield (
            f" {row.adapter:>14} {row.passes:>20} {times} {row.added:7.2%} {memory}"
            f" {row.num_wrong:7}"
        )


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=4096, show_default=True)
@click.option("--hidden", type=click.IntRange(min=32), default=7168, show_default=True)
@click.option("--experts", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--topk", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--wire", default="mxfp4", show_default=True, help="Of dispatch.")
@click.option("--iterations", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(
    device: str,
    tokens: int,
    hidden: int,
    experts: int,
    topk: int,
    wire: str,
    iterations: int,
    json_file: Path | None,
) -> None:
    """Measure what adapters add."""
    try:
        launch.use_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    except RuntimeError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    group, rank = dist.group.WORLD, dist.get_rank()
    ranks = transport_of(group)
    drawn = inputs_of(rank, tokens, hidden, experts, topk)
    x, idx, weights = (t.to(device) for t in (drawn.x, drawn.topk_idx, drawn.topk_weights))
    inputs = Inputs(x, idx, weights, experts)
    options = {"num_experts": experts, "hidden": hidden, "precision": Precision(dispatch=wire)}
    rows, missing = [], []
    for name, make in ADAPTERS.items():
        try:
            pair = make(group, inputs, **options)
        except ImportError as error:
            missing.append(f"{name}: not measured: {error}")
            continue
        rows += [measure(pair, ranks, trains, iterations) for trains in (False, True)]
        pair.a2a.close()
    if rank == 0:
        click.echo(f"# {dist.get_world_size()} ranks, {tokens} x {hidden}, {wire} there")
        click.echo("\n".join([*lines(rows), *(f"# {text}" for text in missing)]))
    if rank == 0 and json_file is not None:
        sizes = {"tokens": tokens, "hidden": hidden, "experts": experts, "topk": topk, "wire": wire}
        content = {
            "command": "bench_adapters",
            "arguments": sizes,
            **machine.about(),
            "ranks": dist.get_world_size(),
            "rows": [dataclasses.asdict(row) for row in rows],
            "not_measured": missing,
        }
        bench_report.write_json(json_file, content)
    dist.destroy_process_group()
    sys.exit(2 if not rows else any(row.num_wrong for row in rows))


if __name__ == "__main__":
    main()
