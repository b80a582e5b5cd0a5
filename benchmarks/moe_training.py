"""Training the model of moe_model.py: batches, sums over ranks, steps, held-out loss.

The batch of a step depends on the seed and the step alone; ranks take equal shares of it.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import dispatch_memory
import numpy as np
import torch
import torch.nn.functional as F
from moe_model import CACHES, PLAIN, LanguageModel, Outputs, Shape, balance_loss
from moe_report import Results, Run
from moe_text import Text, windows
from rich.progress import Progress

from fp4comm import Precision, WireFormat, machine
from fp4comm.bench.clock import gather
from fp4comm.bench.operations import current_device
from fp4comm.routing import route_slot_bytes
from fp4comm.transport import Transport

FLOOR = WireFormat("mxfp4", scale_rule="floor")
POLICIES = {  # dispatch, combine, dispatch_grad, combine_grad
    "bf16": Precision("bf16", "bf16", "bf16", "bf16"),
    "bf16-again": Precision("bf16", "bf16", "bf16", "bf16"),
    "fp8": Precision("fp8", "bf16", "fp8", "fp8"),
    "default": Precision(),
    "mxfp4": Precision("mxfp4", "bf16", "fp8", "fp8"),
    "mxfp4-fp4-combine": Precision("mxfp4", "mxfp4", "fp8", "fp8"),
    "mxfp4-fp4-backward": Precision("mxfp4", "bf16", "mxfp4", "mxfp4"),
    "mxfp4-floor": Precision(FLOOR, "bf16", "fp8", "fp8"),
}
REVERSED = "bf16-again"


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model and how it is trained; `batch` and `held_out` are sequences on all ranks together."""

    shape: Shape
    batch: int
    learning_rate: float
    steps: int
    evaluations: int
    held_out: int


PRESETS = {
    "tiny": Preset(Shape(2, 64, 2, 4, 2, 32, 32), 4, 3e-3, 4, 2, 8),
    "cpu": Preset(Shape(2, 128, 4, 8, 2, 128, 128), 16, 7e-4, 150, 6, 64),
    "h200": Preset(Shape(8, 1024, 16, 64, 8, 256, 1024), 32, 4e-4, 500, 6, 512),
}
WARMUP, LAST_RATE = 0.2, 0.1  # share of the steps that the rate rises; its last value, relative
BETAS, WEIGHT_DECAY, MAX_NORM = (0.9, 0.95), 0.1, 1.0
BALANCE = 0.01  # weight of the load-balancing loss
UNTIMED_STEPS = 3  # that compile, at most
CALIBRATION_STEPS = 12  # of a run that is thrown away, with --seconds
CURVE_POINTS = 200  # of the training loss that are kept


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to train."""

    preset: str
    policies: tuple[str, ...]
    caches: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int | None  # of each run; None: as many as the first makes in `seconds`
    seconds: float | None
    device: str

    def __post_init__(self) -> None:
        """Refuse unknown names, none, and the same run twice."""
        for name, given, known in (
            ("policies", self.policies, POLICIES),
            ("cache", self.caches, CACHES),
        ):
            unknown = [value for value in given if value not in known]
            if unknown or not given:
                got = unknown[0] if unknown else "none"
                raise ValueError(f"{name}: expected some of {', '.join(known)}, got {got}")
        lists: dict[str, tuple[Any, ...]] = {
            "policies": self.policies,
            "cache": self.caches,
            "seeds": self.seeds,
        }
        for name, values in lists.items():
            for number, value in enumerate(values):
                if value in values[:number]:
                    raise ValueError(f"{name}: expected each once, got {value} again")

    def check_ranks(self, group: Transport) -> None:
        """Refuse more ranks than there are experts or sequences for, or than a GPU takes."""
        preset = PRESETS[self.preset]
        most = min(preset.batch, preset.shape.experts)
        if group.num_ranks > most:
            raise ValueError(f"ranks: expected at most {most}, got {group.num_ranks}")
        if group.name == "local" and self.device == "cuda" and group.num_ranks > 1:
            raise ValueError(
                f"ranks: expected 1 without a launcher on cuda, got {group.num_ranks} (autograd"
                " has one thread a GPU, where the backward passes of ranks would wait for another)"
            )


@dataclasses.dataclass(frozen=True)
class Case:
    """What tells one run from the others."""

    seed: int
    policy: str
    cache: str

    @property
    def name(self) -> str:
        """For a reader."""
        of_cache = "" if self.cache == PLAIN else f", cache {self.cache}"
        return f"{self.policy}{of_cache}, seed {self.seed}"


# Ranks


def all_reduce(group: Transport, tensors: list[torch.Tensor]) -> None:
    """Sum float32 tensors over the ranks, in place; each rank sums one part, and sends it to all.

    All ranks get the same bits, over any transport.
    """
    num_ranks, once = group.num_ranks, np.ones(group.num_ranks, np.int64)
    if num_ranks == 1:
        return

    def swap(rows: torch.Tensor) -> torch.Tensor:
        got = torch.empty_like(rows)
        group.exchange([rows.view(torch.uint8)], once, [got.view(torch.uint8)], once)
        return got

    flat = torch.cat([tensor.flatten() for tensor in tensors])
    rows = F.pad(flat, (0, -len(flat) % num_ranks)).view(num_ranks, -1)
    mine = swap(rows).sum(dim=0)
    summed = swap(mine.repeat(num_ranks, 1)).flatten()[: len(flat)]
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, part in zip(tensors, summed.split(sizes), strict=True):
        tensor.copy_(part.view_as(tensor))


def of_all(group: Transport, *numbers: float) -> np.ndarray:
    """Bring numbers of all ranks to all, ``[num_ranks, len(numbers)]`` float64."""
    return gather(group, np.array(numbers, np.float64).view(np.int64)).view(np.float64)


# Training


class Training:
    """One model on one rank, from its start to its last step; collective."""

    def __init__(self, group: Transport, settings: Settings, text: Text, case: Case) -> None:
        """Make the model."""
        self.group, self.text, self.case = group, text, case
        self.preset = PRESETS[settings.preset]
        self.device = current_device(settings.device)
        self.num_tokens = self.preset.batch * self.preset.shape.length
        self.precision = POLICIES[case.policy]
        reset_peak(self.device)
        self.model = LanguageModel(
            group, self.preset.shape, self.precision, case.cache, case.seed, self.device
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )

    def run(self, steps: int, bar: Progress) -> Run:
        """Train for so many steps, and show how far it is."""
        task = bar.add_task(self.case.name, total=steps, loss=math.nan)
        every = max(1, steps // self.preset.evaluations)
        losses: list[float] = []
        times: list[float] = []
        validation: list[tuple[int, float]] = []
        for step in range(steps):
            start = time.perf_counter()
            losses.append(self.step(step, steps))
            times.append(time.perf_counter() - start)
            if (step + 1) % every == 0 or step + 1 == steps:
                validation.append((step + 1, self.held_out_loss()))
                done = f"step {step + 1} of {steps}, held-out loss {validation[-1][1]:.4f}"
                bar.console.print(f"{self.case.name}: {done}")
            bar.update(task, advance=1, loss=losses[-1])
        median_s = statistics.median(times[min(UNTIMED_STEPS, steps - 1) :])
        mine = (sum(times), median_s, peak_bytes(self.device), *self.model.wire_rows())
        ranks = of_all(self.group, *mine)
        train_s, step_s, peak = ranks[:, :3].max(axis=0)
        wire_rows = ranks[:, 3:]
        train_every = math.ceil(steps / CURVE_POINTS)
        cuts = range(0, steps, train_every)
        return Run(
            **dataclasses.asdict(self.case),
            ranks=self.group.num_ranks,
            sitting=0,
            steps=steps,
            train_s=train_s,
            step_ms=1e3 * step_s,
            tokens_per_s=self.num_tokens / step_s,
            peak_bytes=int(peak),
            sent_bytes=self.sent_bytes(wire_rows.sum() / steps),
            sent_to_others_bytes=self.sent_bytes((wire_rows.sum() - wire_rows.trace()) / steps),
            train_every=train_every,
            train_loss=[statistics.mean(losses[cut : cut + train_every]) for cut in cuts],
            validation=validation,
        )

    def step(self, step: int, steps: int) -> float:
        """Train on one batch; return its loss."""
        loss, norm = self.backward(step)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise RuntimeError(
                f"{self.case.name}, step {step + 1}: expected a finite loss and gradient, got"
                f" {loss} and one of norm {norm}"
            )
        gradients = [gradient(p) for p in self.model.parameters()]
        torch._foreach_mul_(gradients, min(1.0, MAX_NORM / norm))
        self.optimizer.param_groups[0]["lr"] = self.preset.learning_rate * rate(step, steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def backward(self, step: int) -> tuple[float, float]:
        """Leave the gradients of all ranks' sequences in the parameters.

        Returns:
            The loss of all ranks, without that of the load, and the norm of all gradients.
        """
        outputs = self.forward(self.batch(step))
        topk = self.preset.shape.topk
        balance = balance_loss(self.group, outputs.routed, self.num_tokens, topk)
        (outputs.loss / self.num_tokens + BALANCE * balance).backward()
        dense = [gradient(p) for p in self.model.dense_parameters()]
        experts = [gradient(p) for p in self.model.expert_parameters()]
        all_reduce(self.group, dense)
        norms = [float(torch.nn.utils.get_total_norm(part)) for part in (dense, experts)]
        ranks = of_all(self.group, outputs.loss.item(), norms[1])
        return float(ranks[:, 0].sum()) / self.num_tokens, math.hypot(norms[0], *ranks[:, 1])

    def forward(self, sequences: torch.Tensor) -> Outputs:
        """Run the model, on a GPU with BF16 products."""
        on_gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
            return self.model(sequences)

    def batch(self, step: int) -> torch.Tensor:
        """Draw this rank's sequences of a step."""
        source, length = self.text.training, self.preset.shape.length
        draw = np.random.default_rng([self.case.seed, step])
        starts = draw.integers(len(source) - length, size=self.preset.batch)
        return self.mine(source, starts[::-1] if self.case.policy == REVERSED else starts)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss on the same sequences of the held-out text at each call."""
        source, preset = self.text.held_out, self.preset
        starts = np.linspace(0, len(source) - preset.shape.length - 1, preset.held_out, dtype=int)
        loss = torch.zeros((), device=self.device)
        for part in np.split(starts, range(preset.batch, len(starts), preset.batch)):
            loss += self.forward(self.mine(source, part)).loss
        return float(of_all(self.group, loss.item()).sum() / (len(starts) * preset.shape.length))

    def mine(self, source: np.ndarray, starts: np.ndarray) -> torch.Tensor:
        """Cut this rank's share of the sequences out."""
        share = np.array_split(starts, self.group.num_ranks)[self.group.rank]
        return windows(source, share, self.preset.shape.length).to(self.device)

    def sent_bytes(self, wire_rows: float) -> dict[str, float]:
        """Bytes that so many wire rows take in each pass."""
        hidden, topk = self.preset.shape.hidden, self.preset.shape.topk
        row = {
            field.name: WireFormat.of(getattr(self.precision, field.name)).row_bytes(hidden)
            for field in dataclasses.fields(self.precision)
        }
        row["dispatch"] += topk * route_slot_bytes(weights=True)
        row["dispatch_grad"] += 4 * topk  # gradients of the weights, float32
        return {name: wire_rows * num_bytes for name, num_bytes in row.items()}


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Its gradient, zeros where no token came."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def rate(step: int, steps: int) -> float:
    """Learning rate of a step, relative to the highest: a rise, then half a cosine."""
    rising = max(1, round(WARMUP * steps))
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def reset_peak(device: torch.device) -> None:
    """Forget earlier runs."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        dispatch_memory.reset_peak()


def peak_bytes(device: torch.device) -> int:
    """Highest number of bytes since then: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return dispatch_memory.resident_bytes("VmHWM")


def train_all(
    group: Transport,
    settings: Settings,
    text: Text,
    arguments: dict[str, Any],
    bar: Progress,
    finished: Callable[[Results], None],
) -> Results:
    """Train with every seed, policy and cache; collective.

    Args:
        arguments: of the command, for the results.
        finished: called with the results so far after each run.
    """
    named = itertools.product(settings.seeds, settings.policies, settings.caches)
    cases = [Case(*names) for names in named]
    steps = settings.steps
    if steps is None:
        trial = Training(group, settings, text, cases[0]).run(CALIBRATION_STEPS, bar)
        steps = max(1, round(1e3 * (settings.seconds or 0) / trial.step_ms))
    results = Results(setup(settings, text, steps), [sitting(group, arguments)], [])
    for case in cases:
        results.runs.append(Training(group, settings, text, case).run(steps, bar))
        finished(results)
    return results


def setup(settings: Settings, text: Text, steps: int) -> dict[str, Any]:
    """What has to be the same for runs to be compared."""
    preset = PRESETS[settings.preset]
    return {
        **dataclasses.asdict(preset),
        "parameters": preset.shape.num_parameters,
        "steps": steps,
        "device": settings.device,
        "text": text.name,
        "text_bytes": len(text.training),
        "text_crc32": text.checksum,
    }


def sitting(group: Transport, arguments: dict[str, Any]) -> dict[str, Any]:
    """Where and with what these runs are made."""
    return {
        "arguments": arguments,
        "ranks": group.num_ranks,
        "transport": group.name,
        **machine.about(),
    }
