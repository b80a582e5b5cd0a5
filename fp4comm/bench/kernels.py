"""Timing the kernels inside dispatch and combine, as `fp4comm.bench.calibrate` needs them.

Collective: they run on all ranks at once.  Times are medians.
"""

from __future__ import annotations

import statistics

import numpy as np
import torch

from fp4comm import codec, progress
from fp4comm.all_to_all import AllToAll
from fp4comm.bench.check import expert_outputs
from fp4comm.bench.clock import Stopwatch, gather
from fp4comm.bench.operations import current_device
from fp4comm.bench.workload import Synthetic
from fp4comm.dispatched import Dispatched
from fp4comm.formats import FORMATS, WireFormat, fp8_row_bytes
from fp4comm.precision import Precision
from fp4comm.quantities import SHARES
from fp4comm.topology import KERNELS
from fp4comm.transport import Transport

REPEATS = 5
HIDDEN, LOCAL_EXPERTS, TOPK = 2048, 8, 8
TOKENS = {"cpu": (64, 1024), "cuda": (128, 8192)}  # few and many

Sample = tuple[float, float]  # bytes, us


class Kernels:
    """Times the parts of dispatch and combine that compute, with few and with many tokens."""

    def __init__(self, transport: Transport, device: str, timeout_s: float) -> None:
        """Note whom to measure."""
        self._transport, self._stopwatch = transport, Stopwatch(transport, device)
        self._device, self._timeout_s = current_device(device), timeout_s
        self._sizes = TOKENS[device]
        self._samples: dict[tuple[str, str], list[Sample]] = {}

    def measure(
        self, copy_gbs: float, tell: progress.Tell
    ) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Return the times of calls, and shares of the copy's speed."""
        for wire in FORMATS:
            tell(f"measuring kernels: {wire}")
            for tokens in self._sizes:
                self._once(wire, tokens)
        calls: dict[str, list[float]] = {}
        shares: dict[str, dict[str, float]] = {}
        for (name, wire), samples in self._samples.items():
            call_us, gbs = line(*samples)
            calls.setdefault(name, []).append(call_us)
            if name in KERNELS:
                shares.setdefault(name, {})[wire] = min(max(gbs / copy_gbs, SHARES[0]), SHARES[1])
            else:  # not bytes but slots: us for each
                calls.setdefault(f"{name}_slot", []).append(1 / (gbs * 1e3))
        median = {name: statistics.median(us) for name, us in calls.items()}
        calls_us = {n: median[n] for n in ("plan", "plan_slot", "layout", "layout_slot")}
        calls_us["quantize"] = median["quantize"]
        calls_us["arrive"] = min(median["arrive_fp8"], median["arrive_bf16"])
        calls_us["reduce"] = min(median["weighted_reduce"], median["final_reduce"])
        return calls_us, shares

    def _once(self, wire_name: str, tokens: int) -> None:
        """Time every part with one wire format and number of tokens."""
        wire = WireFormat(wire_name)
        ranks, hidden = self._transport.num_ranks, HIDDEN
        work = Synthetic(ranks, tokens, hidden, LOCAL_EXPERTS * ranks, TOPK)
        idx, weights = map(torch.from_numpy, work.routing(self._transport.rank))
        x = torch.randn(tokens, hidden).bfloat16()
        inputs = tuple(part.to(self._device) for part in (x, idx, weights))
        rows, slots, padded = self._arrivals(work, inputs, wire)
        sent = tokens * 2 * hidden + rows * wire.row_bytes(hidden)
        arrived = rows * wire.row_bytes(hidden)
        packed = self._parts(work, inputs, wire, "packed")
        self._note("plan", wire_name, tokens * TOPK, packed["dispatch plan"])
        self._note("layout", wire_name, rows * TOPK, packed["dispatch arrive"])
        self._note("quantize", wire_name, sent, packed["dispatch quantize"])
        for arrive, row in (("fp8", fp8_row_bytes(hidden)), ("bf16", 2 * hidden)):
            parts = self._parts(work, inputs, wire, arrive)
            us = parts["dispatch arrive"] - packed["dispatch arrive"]
            self._note(f"arrive_{arrive}", wire_name, arrived + padded * row, us)
        self._note("weighted_reduce", wire_name, slots * 2 * hidden + arrived, parts["weighted"])
        us = parts["combine reduce"] - parts["weighted"]
        self._note("final_reduce", wire_name, arrived + tokens * 2 * hidden, us)

    def _note(self, name: str, wire: str, num_bytes: float, us: float) -> None:
        self._samples.setdefault((name, wire), []).append((num_bytes, max(us, 0.1)))

    def _all_to_all(self, work: Synthetic, wire: WireFormat, arrive: str) -> AllToAll:
        return AllToAll(
            self._transport,
            num_experts=work.num_experts,
            hidden=HIDDEN,
            precision=Precision(dispatch=wire, combine=wire),
            arrive=arrive,
            timeout_s=self._timeout_s,
        )

    def _arrivals(
        self, work: Synthetic, inputs: tuple[torch.Tensor, ...], wire: WireFormat
    ) -> tuple[int, int, int]:
        """Wire rows, expert rows, and these with padding, of the rank that gets most."""
        d = self._all_to_all(work, wire, "packed").dispatch(*inputs)
        layout = d.handle.layout
        mine = [len(layout.slot_rows), sum(d.num_rows_list), layout.num_expert_rows]
        rows, slots, padded = gather(self._transport, mine).max(axis=0).tolist()
        return rows, slots, padded

    def _parts(
        self,
        work: Synthetic,
        inputs: tuple[torch.Tensor, ...],
        wire: WireFormat,
        arrive: str,
    ) -> dict[str, float]:
        """Median us of the slowest rank in each part; of combine too, with BF16 arrival."""
        a2a = self._all_to_all(work, wire, arrive)
        experts = range(
            self._transport.rank * LOCAL_EXPERTS, (self._transport.rank + 1) * LOCAL_EXPERTS
        )
        samples: dict[str, list[int]] = {}
        for i in range(REPEATS + 1):
            a2a.timings = {}
            d, _ = self._stopwatch.time(lambda: a2a.dispatch(*inputs))
            if arrive == "bf16":
                a2a.timings["weighted"] = self._combine(a2a, d, wire, experts)
            if i:
                for name, seconds in a2a.timings.items():
                    samples.setdefault(name, []).append(round(seconds * 1e9))
        names = sorted(samples)
        ns = gather(self._transport, np.concatenate([samples[name] for name in names]))
        slowest = ns.reshape(self._transport.num_ranks, len(names), -1).max(axis=0)
        return dict(zip(names, (np.median(slowest, axis=1) / 1e3).tolist(), strict=True))

    def _combine(self, a2a: AllToAll, d: Dispatched, wire: WireFormat, experts: range) -> float:
        """Combine; return the seconds of its first kernel, run once more alone."""
        out = expert_outputs(d, experts)

        def reduce() -> object:
            kernel = codec.of(self._device).weighted_reduce
            return kernel(out, d.handle.layout, wire, weighted=True)

        _, took = self._stopwatch.time(reduce)
        self._stopwatch.time(lambda: a2a.combine(out, d.handle))
        return took / 1e9


def line(few: Sample, many: Sample) -> tuple[float, float]:
    """Lay a line through two samples: us at no bytes, at least 0, and GB/s beyond.

    Example:
        >>> line((1000.0, 3.0), (9000.0, 7.0))
        (2.5, 2.0)
    """
    more_us = many[1] - few[1]
    if more_us <= 0:  # noise, or all of it is the call
        return 0.0, many[0] / many[1] / 1e3
    gbs = (many[0] - few[0]) / more_us / 1e3
    call_us = few[1] - few[0] / gbs / 1e3
    if call_us < 0:  # caches helped with few
        return 0.0, many[0] / many[1] / 1e3
    return call_us, gbs
