"""A small mixture-of-experts language model over bytes; its experts are spread over the ranks.

A pre-norm transformer: causal attention with rotary positions, and in each layer a top-k router
with SwiGLU experts behind `AllToAll`.  Experts are those of this rank, all else is the same on
every rank.  Initial values depend on the seed and a parameter's name alone, not on the ranks.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fp4comm import AllToAll, Precision, experts
from fp4comm.bench.clock import gather
from fp4comm.routing import Placement
from fp4comm.transport import Transport

VOCABULARY = 256  # bytes
PLAIN = "plain"  # BF16 rows on arrival, kept by torch's autograd
CACHES = (PLAIN, *experts.CACHES)
SCALE = 0.02  # standard deviation of initial weights
ROTARY_BASE = 10000.0
GROUPED_MM_ROWS = 128  # expert_alignment on a GPU


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model; `experts` on all ranks together, `length` in bytes."""

    layers: int
    hidden: int
    heads: int
    experts: int
    topk: int
    expert_hidden: int
    length: int

    @property
    def num_parameters(self) -> int:
        """Of all ranks together, those of all experts included."""
        experts = self.experts * 3 * self.hidden * self.expert_hidden
        layer = 4 * self.hidden**2 + self.experts * self.hidden + experts + 2 * self.hidden
        return self.layers * layer + 2 * VOCABULARY * self.hidden + self.hidden


@dataclasses.dataclass(frozen=True)
class Start:
    """Draws initial weights, of each parameter by its name."""

    seed: int
    device: torch.device

    def draw(self, name: str, *shape: int, scale: float = SCALE) -> torch.Tensor:
        """Draw from a normal distribution."""
        generator = torch.Generator(self.device)
        generator.manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        return torch.randn(shape, generator=generator, device=self.device) * scale

    def weight(self, name: str, *shape: int, scale: float = SCALE) -> nn.Parameter:
        """Draw a parameter."""
        return nn.Parameter(self.draw(name, *shape, scale=scale))

    def experts(self, name: str, numbers: range, *shape: int, scale: float = SCALE) -> nn.Parameter:
        """Draw one parameter for some experts, ``[len(numbers), *shape]``."""
        drawn = [self.draw(f"{name} {number}", *shape, scale=scale) for number in numbers]
        return nn.Parameter(torch.stack(drawn))

    def ones(self, hidden: int) -> nn.Parameter:
        """Make the gain of a norm."""
        return nn.Parameter(torch.ones(hidden, device=self.device))


def rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Scale the last dimension to a mean square of 1, then by the gain."""
    return F.rms_norm(x, gain.shape, gain)


def rotary_angles(length: int, head: int, device: torch.device) -> torch.Tensor:
    """Angle of each position and pair of features, ``[length, head / 2]``."""
    frequencies = ROTARY_BASE ** -torch.linspace(0, 1, head // 2, device=device)
    return torch.outer(torch.arange(length, device=device).float(), frequencies)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn pairs of features of ``[..., length, head]`` by their position's angles."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape, start: Start, name: str) -> None:
        """Draw the weights."""
        super().__init__()
        hidden, out_scale = shape.hidden, SCALE / (2 * shape.layers) ** 0.5
        self.heads = shape.heads
        self.norm = start.ones(hidden)
        self.qkv = start.weight(f"{name} qkv", 3 * hidden, hidden)
        self.out = start.weight(f"{name} out", hidden, hidden, scale=out_scale)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """``[batch, length, hidden]`` to the same."""
        projected = F.linear(rms_norm(x, self.norm), self.qkv)
        q, k, v = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            rotate(q, angles), rotate(k, angles), v, is_causal=True
        )
        return F.linear(mixed.transpose(1, 2).flatten(2), self.out)


@dataclasses.dataclass(frozen=True)
class Routed:
    """What a layer's router did with this rank's tokens.

    Attributes:
        probabilities: ``[experts]`` float32, summed over tokens; differentiable.
        counts: ``[experts]`` int64, top-k slots that chose each expert.
    """

    probabilities: torch.Tensor
    counts: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Place:
    """Where experts are.

    Attributes:
        numbers: of the experts of this rank.
        owners: ``[experts]`` int64, rank of each expert.
        ranks: ``[num_ranks]`` int64, their numbers.
    """

    numbers: range
    owners: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def of(cls, num_experts: int, group: Transport, device: torch.device) -> Place:
        """Spread experts as `AllToAll` does."""
        placement = Placement(num_experts, group.num_ranks)
        ranks = torch.arange(group.num_ranks, device=device)
        held = torch.from_numpy(np.diff(placement.offsets)).to(device)
        return cls(placement.experts(group.rank), ranks.repeat_interleave(held), ranks)


class Experts(nn.Module):
    """Router and SwiGLU experts of one layer.

    With cache "plain" rows arrive as BF16, products are in BF16 (float32 on a CPU), and torch's
    autograd keeps what it needs; other caches are those of `fp4comm.experts.swiglu`, whose products
    are in FP8 where the GPU has them.
    """

    def __init__(
        self, shape: Shape, start: Start, name: str, a2a: AllToAll, place: Place, cache: str
    ) -> None:
        """Draw the weights of the experts that this rank holds."""
        super().__init__()
        hidden, inner = shape.hidden, shape.expert_hidden
        out_scale = SCALE / (2 * shape.layers) ** 0.5
        self.topk, self.cache, self.a2a = shape.topk, cache, a2a
        self.norm = start.ones(hidden)
        self.router = start.weight(f"{name} router", shape.experts, hidden)
        self.gate_up = start.experts(f"{name} gate_up", place.numbers, 2 * inner, hidden)
        self.down = start.experts(f"{name} down", place.numbers, hidden, inner, scale=out_scale)
        self.owners = place.owners
        self.wire_rows = torch.zeros_like(place.ranks)  # sent while training, to each rank

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routed]:
        """``[tokens, hidden]`` to the same."""
        x = rms_norm(x, self.norm)
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.linear(x.float(), self.router).softmax(dim=-1)
        weights, idx = probabilities.topk(self.topk)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        chosen = idx.flatten()
        counts = torch.zeros_like(self.router[:, 0], dtype=torch.int64)
        counts = counts.scatter_add(0, chosen, torch.ones_like(chosen))
        if torch.is_grad_enabled():
            self._count_wire_rows(idx)
        routed = Routed(probabilities.sum(dim=0), counts)
        if self.cache == PLAIN:
            return self._plain(x.bfloat16(), idx, weights), routed
        layer = self.gate_up, self.down
        y = experts.swiglu(self.a2a, x.bfloat16(), idx, weights, *layer, cache=self.cache)
        return y, routed

    def _plain(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = self.a2a.dispatch(x, idx, weights)
        assert d.rows is not None
        rows = d.rows if d.rows.is_cuda else d.rows.float()  # BF16 products are slow on most CPUs
        ends = d.expert_offsets[1:].int()
        gate, up = grouped_linear(rows, self.gate_up, ends).chunk(2, dim=-1)
        inner = (
            F.silu(gate) * up * d.row_weights[:, None]
        )  # weighted here, so combine keeps nothing
        out = grouped_linear(inner.to(rows.dtype), self.down, ends)
        return self.a2a.combine(out.bfloat16(), d.handle, weighted=False)

    def _count_wire_rows(self, idx: torch.Tensor) -> None:
        """A token goes once to each rank that holds one of its experts."""
        goes = idx.new_zeros((len(idx), len(self.wire_rows)))
        self.wire_rows += goes.scatter(1, self.owners[idx], 1).sum(dim=0)


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's rows, which end at ``ends``, by its weight ``[experts, out, in]``."""
    return F.grouped_mm(rows, weight.to(rows.dtype).transpose(1, 2), offs=ends)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What a forward pass of this rank's sequences gives.

    Attributes:
        loss: cross-entropy in nats, summed over bytes.
        routed: of each layer.
    """

    loss: torch.Tensor
    routed: list[Routed]


class LanguageModel(nn.Module):
    """The whole model; collective: all ranks make it, and call it, together.

    Args:
        group: the ranks that share the experts.
        precision: wire formats of the exchange.
        cache: what the experts keep for backward, of `CACHES`.
        seed: of the initial weights.
    """

    def __init__(
        self,
        group: Transport,
        shape: Shape,
        precision: Precision,
        cache: str,
        seed: int,
        device: torch.device,
    ) -> None:
        """Draw the weights."""
        super().__init__()
        a2a = AllToAll(
            group,
            num_experts=shape.experts,
            hidden=shape.hidden,
            precision=precision,
            arrive="bf16",
            expert_alignment=GROUPED_MM_ROWS if device.type == "cuda" else 1,
            timeout_s=group.timeout_s,
        )
        place = Place.of(shape.experts, group, device)
        start, layers = Start(seed, device), range(shape.layers)
        self.embedding = start.weight("embedding", VOCABULARY, shape.hidden)
        self.attention = nn.ModuleList(Attention(shape, start, f"layer {n}") for n in layers)
        self.experts = nn.ModuleList(
            Experts(shape, start, f"layer {n}", a2a, place, cache) for n in layers
        )
        self.norm = start.ones(shape.hidden)
        self.head = start.weight("head", VOCABULARY, shape.hidden)
        self.angles = rotary_angles(shape.length, shape.hidden // shape.heads, device)

    def forward(self, text: torch.Tensor) -> Outputs:
        """Predict each byte of ``[sequences, length + 1]`` from those before it."""
        x, routed = F.embedding(text[:, :-1], self.embedding), []
        for attention, moe in zip(self.attention, self.experts, strict=True):
            x = x + attention(x, self.angles)
            y, of_layer = moe(x.flatten(0, 1))
            x = x + y.view_as(x)
            routed.append(of_layer)
        logits = F.linear(rms_norm(x, self.norm), self.head).flatten(0, 1)
        loss = F.cross_entropy(logits.float(), text[:, 1:].flatten(), reduction="sum")
        return Outputs(loss, routed)

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """Those that all ranks hold."""
        return (p for name, p in self.named_parameters() if not is_of_expert(name))

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Those that this rank alone holds."""
        return (p for name, p in self.named_parameters() if is_of_expert(name))

    def wire_rows(self) -> list[int]:
        """Wire rows that this rank sent to each while training."""
        layers = [layer.wire_rows for layer in self.modules() if isinstance(layer, Experts)]
        return torch.stack(layers).sum(dim=0).tolist()


def is_of_expert(name: str) -> bool:
    """Tell a parameter of single experts by its name."""
    return name.endswith((".gate_up", ".down"))


def balance_loss(
    group: Transport, routed: list[Routed], num_tokens: int, topk: int
) -> torch.Tensor:
    """Load-balancing loss of all layers, this rank's part: 1 a layer if experts share evenly.

    An expert's share of the slots of all ranks' tokens times its mean probability, summed over
    experts and multiplied by their number (arXiv 2101.03961, 2.2).  ``num_tokens`` is of all ranks.
    """
    probabilities = torch.stack([of_layer.probabilities for of_layer in routed])
    counts = torch.stack([of_layer.counts for of_layer in routed])
    of_all = gather(group, counts.flatten().cpu().numpy()).sum(axis=0)
    shares = torch.from_numpy(of_all).view_as(counts) / (num_tokens * topk)
    mean = probabilities / num_tokens
    return counts.shape[1] * (shares.to(mean) * mean).sum()
