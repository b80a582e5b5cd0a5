"""All there is to measure on the GPUs of one machine, one rank each, in about ten minutes.

    python benchmarks/several_gpus.py -n 4 --out results
    python benchmarks/several_gpus.py -n 4 --out results --one-gpu --nccl FOLDER    # a rehearsal

First rounds, mistakes, streams and gradients on real ranks, byte for byte against the CPU; then the
links, as `fp4comm bench --calibrate` finds them; dispatch and combine in every wire format against
the plain all-to-all of BF16 rows, on uniform, skewed and recorded routing; what `fp4comm plan` says
of the uniform ones (it takes --skew and --routing, and needs no GPU, for the others); and the
training of `train_moe.py`, as many steps with each wire as the first makes in the time it has.  A
step that fails or takes too long does not keep the next from running.

--one-gpu lets the ranks share one GPU, by one_gpu.py, which takes --nccl.  NVLink's multicast stays
off: fp4comm does not use it.

Exit code: 0; 1 if a step failed; 2 without a GPU.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
from one_gpu import ROOT_VARIABLES, check_gpu, end, mpirun_ranks

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
FP4COMM, CUDA = ("-m", "fp4comm"), ("--device", "cuda")
WIRES = "bf16,fp8,mxfp8,mxfp4"
SHAPES = {"7168": "128,512,4096", "2048": "3072"}  # hidden: tokens of a rank
POLICIES = "bf16,fp8,mxfp4"


@dataclasses.dataclass(frozen=True)
class Step:
    """A command of Python's, what it may take, and whether ranks run it."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    on_ranks: bool = True


def steps(num_ranks: int, out: Path, train_s: float) -> Iterator[Step]:
    """Everything, in order."""
    program = str(ROOT / "tests" / "gpu" / "rank_program.py")
    yield Step("tests", (program, "nccl", "rounds", "mistakes", "streams", "gradients"), 180)
    links = out / f"links_{num_ranks}_gpus.toml"
    yield Step("links", (*FP4COMM, "bench", *CUDA, "--calibrate", str(links)), 90)

    def bench(name: str, *options: str) -> Step:
        command = (*FP4COMM, "bench", *CUDA, *options, "--wire", WIRES)
        return Step(name, (*command, "--json", file_of(out, name, num_ranks)), 90)

    recorded = str(ROOT / "tests" / "data" / "layer0.safetensors")
    routings = {
        "uniform": ("--experts", "256", "--topk", "8"),
        "skewed": ("--experts", "256", "--topk", "8", "--skew", "1"),
        "recorded": ("--routing", recorded),
    }
    for routing, options in routings.items():
        for hidden, tokens in SHAPES.items():
            yield bench(f"{routing}_{hidden}", "--hidden", hidden, "--tokens", tokens, *options)
    for hidden, tokens in SHAPES.items():
        of = ("--ranks-per-node", str(num_ranks), "--hidden", hidden, "--wire", WIRES)
        for count in tokens.split(","):
            for topology in ("hgx-h200-400g", str(links)):
                name = f"plan_{Path(topology).stem}_{hidden}_{count}"
                plan = (*FP4COMM, "plan", "--topology", topology, *of, "--tokens", count)
                command = (*plan, "--json", file_of(out, name, num_ranks))
                yield Step(name, command, 60, on_ranks=False)
    train = (str(HERE / "train_moe.py"), "--preset", "h200", *CUDA, "--policies", POLICIES)
    till = ("--seconds", str(train_s), "--json", file_of(out, "train", num_ranks))
    yield Step("train", (*train, *till), 60 + 1.5 * train_s * len(POLICIES.split(",")))


def file_of(out: Path, name: str, num_ranks: int) -> str:
    """Where a step writes."""
    return str(out / f"{name}_{num_ranks}_gpus.json")


def run(step: Step, launcher: list[str], out: Path) -> str:
    """Run a step, with what it prints in a file; say how it ended."""
    command = [*(launcher if step.on_ranks else []), sys.executable, *step.arguments]
    environment = {**os.environ, **NO_MULTICAST, **ROOT_VARIABLES}
    with (out / f"{step.name}.txt").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait(step.limit_s)
            return "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            return f"not over after {step.limit_s:.0f} s"
        finally:
            end(process)


@click.command()
@click.option("-n", "--ranks", type=click.IntRange(min=2), required=True, help="GPUs.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder for JSON files, and for what each step prints.",
)
@click.option("--train-s", default=60.0, show_default=True, help="Seconds of the first training.")
@click.option("--only", help="Steps, by the start of their names, separated by commas.")
@click.option("--one-gpu", is_flag=True, help="Let the ranks share one GPU.")
@click.option("--nccl", type=click.Path(exists=True), help="As one_gpu.py takes it.")
def main(
    ranks: int, out: Path, train_s: float, only: str | None, one_gpu: bool, nccl: str | None
) -> None:
    """Test and measure on several GPUs of this machine."""
    if nccl is not None and not one_gpu:
        raise click.UsageError("nccl: expected with --one-gpu, got it alone")
    chosen = tuple(only.split(",")) if only else ("",)
    wanted = [step for step in steps(ranks, out.resolve(), train_s) if step.name.startswith(chosen)]
    if any(step.on_ranks for step in wanted):
        check_gpu()
    out.mkdir(parents=True, exist_ok=True)
    if one_gpu:
        of_nccl = [] if nccl is None else ["--nccl", nccl]
        launcher = [sys.executable, str(HERE / "one_gpu.py"), "-n", str(ranks), *of_nccl, "--"]
    else:
        launcher = mpirun_ranks(ranks)
    failed = 0
    for step in wanted:
        start = time.monotonic()
        ended = run(step, launcher, out)
        failed += ended != "ok"
        click.echo(f"{step.name:32} {time.monotonic() - start:6.1f} s  {ended}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
