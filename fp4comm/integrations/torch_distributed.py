"""all_to_all_rows: the all-to-all of token rows that MoE layers call, in a wire format.

    rows -> quantize -> exchange -> BF16 rows         backward: the other way, in grad_wire
            codec       transport   codec

It has no routing: rows go where send_splits says, and arrive in the order of a plain all-to-all.
The splits of all ranks are compared ahead of them, with the fingerprint of the call.

Run with torch 2.13.0: gloo on CPU ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from fp4comm import agreement, autograd, check, codec, hops
from fp4comm.eager import uncompiled
from fp4comm.formats import WireFormat
from fp4comm.integrations._common import transport_of
from fp4comm.outgoing import autocast, check_device
from fp4comm.packed import PackedRows
from fp4comm.transport import Lent, StoppingPeers, Transport
from fp4comm.transport._arguments import as_splits

NAME = "all_to_all_rows"

# Calls on each transport, the same on all of its ranks.
_CALLS: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


@uncompiled
def all_to_all_rows(
    rows: torch.Tensor,
    send_splits: Any = None,
    recv_splits: Any = None,
    group: Any = None,
    wire: WireFormat | str = "mxfp4",
    *,
    grad_wire: WireFormat | str = "bf16",
    timeout_s: float = 300.0,
) -> torch.Tensor:
    """Send rows to ranks in a wire format, in place of an all-to-all of BF16 rows.

    Rows for rank d are ``rows[offset : offset + send_splits[d]]`` with offset the sum of the splits
    before d; they arrive by source rank, and from each in its order.  Those to this rank itself are
    quantized as all are.  Differentiable, straight through the quantization; the backward pass is
    collective too: all ranks make it, in the same order, also one that no rows came to; one that
    fails, a second one through a freed graph too, stops the peers and leaves the transport broken.
    On a GPU the work is queued on the current stream; the host waits for the counts alone, and for
    splits that are on the GPU.

    Args:
        rows: ``[n, hidden]`` bfloat16, ``hidden % 32 == 0``; any strides; n may be 0.  Under
            autocast float32 and float16 are cast.
        send_splits: ``[num_ranks]`` rows for each rank, n together: ints, or an integer tensor or
            array.  None: as many for each.
        recv_splits: ``[num_ranks]`` rows from each rank, likewise.  None: as many as each is sent,
            if send_splits is None, too.
        group: torch.distributed ProcessGroup; None is WORLD; or a transport of fp4comm.  A group's
            transport is opened by the first call, and closed when the group is gone.
        wire: format of the rows: ``"bf16"``, ``"fp8"``, ``"mxfp8"``, ``"mxfp4"`` or a `WireFormat`.
        grad_wire: format of their gradients.
        timeout_s: seconds that a call, also that of the backward pass, waits for a peer.

    Returns:
        ``[sum(recv_splits), hidden]`` bfloat16: what quantize(rows, wire).to_bf16() has there.

    Raises:
        ValueError, TypeError, RuntimeError: on all ranks alike, naming rank and argument, if one
            rank's arguments are wrong, if its recv_splits are not what it is sent, or if hidden,
            formats or whether gradients are wanted differ; nothing was sent.
        TimeoutError: naming rank and peer, if one does not come.

    Example: one rank.  4.5 is between two E2M1 codes.
        >>> import torch
        >>> from fp4comm import all_to_all_rows, transport
        >>> rows = torch.tensor([[4.5] * 32]).bfloat16()
        >>> all_to_all_rows(rows, [1], [1], transport.open("local"))[0, 0].item()
        4.0
    """
    transport = transport_of(group, timeout_s)
    number = next(_CALLS.setdefault(transport, itertools.count(1)))
    failure: Exception | None = None
    sent: hops.Rows = []
    mine = agreement.Fingerprint(agreement.ROWS)
    try:
        check.seconds("timeout_s", timeout_s)
        check.no_tangent("rows", rows)
        source = check.rows("rows", autocast(rows), (torch.bfloat16,))
        check_device(transport, "rows", source.device)
        num_rows, hidden = source.shape
        splits = Splits.of(transport.num_ranks, send_splits, recv_splits, num_rows)
        there, back = WireFormat.of(wire), WireFormat.of(grad_wire, "grad_wire")
        move = Move(transport, hidden, timeout_s, f"{NAME} {number}")
        edge = autograd.edge_of("rows", rows)
        mine = agreement.Fingerprint(
            agreement.ROWS,
            call=number,
            history=transport.history,
            hidden=hidden,
            wire=agreement.WIRES.index(there),
            grad_wire=agreement.WIRES.index(back),
            device=int(source.is_cuda),
            gradient=int(edge is not None),
        )
        sent = move.quantized(source, there)
    except Exception as error:
        failure, splits = error, Splits.none(transport.num_ranks)
    with Lent(transport, f"{NAME} counts", timeout_s if failure is None else transport.timeout_s):
        compare(transport, mine, splits, failure)
    with StoppingPeers(transport, NAME):
        y = move.exchanged(sent, there, splits, NAME, move.label)
    if edge is None:
        return y

    def of_gradient(dy: torch.Tensor) -> torch.Tensor:
        name = f"{NAME} backward"
        sent = move.quantized(dy, back)
        return move.exchanged(sent, back, splits.reversed(), name, f"backward of {move.label}")

    with torch.enable_grad():
        return AllToAllRows.apply(edge, transport, of_gradient, [y])


@dataclasses.dataclass(frozen=True)
class Splits:
    """Rows for each rank and from each, ``[num_ranks]`` int64."""

    send: np.ndarray
    recv: np.ndarray

    @staticmethod
    def of(num_ranks: int, send: Any, recv: Any, num_rows: int) -> Splits:
        """Check what the caller gave."""
        if send is None:
            if num_rows % num_ranks:
                raise ValueError(
                    f"rows: expected a multiple of {num_ranks} (ranks; there is no send_splits),"
                    f" got {num_rows}"
                )
            recv = [num_rows // num_ranks] * num_ranks if recv is None else recv
            send = [num_rows // num_ranks] * num_ranks
        elif recv is None:
            raise ValueError("recv_splits: expected with send_splits, got None")
        send, recv = (
            np.array(
                as_splits(value.tolist() if torch.is_tensor(value) else value, name, num_ranks)
            )
            for name, value in (("send_splits", send), ("recv_splits", recv))
        )
        total = sum(send.tolist())
        if total != num_rows:
            raise ValueError(
                f"send_splits: expected {num_rows} together, as there are rows, got {total}"
            )
        return Splits(send, recv)

    @staticmethod
    def none(num_ranks: int) -> Splits:
        """No rows at all."""
        return Splits(np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64))

    def reversed(self) -> Splits:
        """Those of the way back."""
        return Splits(self.recv, self.send)

    def balance(self, rank: int) -> np.uint64:
        """Weigh what this rank sends less what it expects; over all ranks that is 0.

        Modulo 2**64, each pair of ranks with a weight of its own: splits that disagree come to 0
        only by an accident of 1 in 2**64.
        """
        ranks = np.arange(len(self.send))
        sent = _weights(rank, ranks) * self.send.astype(np.uint64)
        return sent.sum() - (_weights(ranks, rank) * self.recv.astype(np.uint64)).sum()


def compare(
    transport: Transport, mine: agreement.Fingerprint, splits: Splits, failure: Exception | None
) -> None:
    """Compare fingerprints and splits; what is wrong on one rank is raised on all."""
    counts = np.empty((transport.num_ranks, 2), np.uint64)
    with np.errstate(over="ignore"):
        counts[:, 0], counts[:, 1] = splits.send, splits.balance(transport.rank)
        told = agreement.agree(transport, mine, counts.view(np.int64), failure)
        if told[:, 1].view(np.uint64).sum() == 0:
            return
    wrong = np.flatnonzero(told[:, 0] != splits.recv)
    said = ""
    if len(wrong):
        peer = int(wrong[0])
        said = f"recv_splits: expected {told[peer, 0]} rows from rank {peer}, as its send_splits"
        said += f" has for this one, got {splits.recv[peer]}"
    texts = agreement.exchange_texts(transport, said)
    rank = next(rank for rank, text in enumerate(texts) if text)
    raise ValueError(agreement.on_rank(rank, transport.num_ranks, texts[rank]))


@dataclasses.dataclass(frozen=True)
class Move:
    """What the rows and their gradients have in common on their ways."""

    transport: Transport
    hidden: int
    timeout_s: float
    label: str

    def quantized(self, rows: torch.Tensor, wire: WireFormat) -> hops.Rows:
        """Make payload and scales."""
        return [*codec.of(rows.device).quantize_rows(rows.resolve_neg().contiguous(), wire)]

    def exchanged(
        self, sent: hops.Rows, wire: WireFormat, splits: Splits, name: str, label: str
    ) -> torch.Tensor:
        """Exchange them and convert what came."""

        def phase(part: str, label: str = "") -> contextlib.AbstractContextManager[None]:
            return Lent(self.transport, f"{name} {part}", self.timeout_s, label)

        exchange = hops.Exchange(self.transport, phase, label)
        payload, scales = exchange(sent, splits.send, splits.recv)
        return PackedRows(payload, scales, wire, self.hidden).to_bf16()


class AllToAllRows(torch.autograd.Function):
    """Backward: the gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        transport: Transport,
        of_gradient: Callable[[torch.Tensor], torch.Tensor],
        made: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return what was made, and note the way back."""
        ctx.transport, ctx.of_gradient, ctx.dtype = transport, of_gradient, rows.dtype
        # Reading it back makes a checkpoint recompute on every rank, whatever is done with rows.
        ctx.save_for_backward(made[0].new_empty(0))
        return made.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> autograd.Gradients:
        """Send the gradients back."""
        with torch.no_grad(), StoppingPeers(ctx.transport, f"{NAME} backward"):
            _ = ctx.saved_tensors
            gradient = ctx.of_gradient(gradients[0]).to(ctx.dtype)
        return *autograd.differentiable_once(gradient), None, None, None


def _weights(source: Any, target: Any) -> np.ndarray:
    """Mix the numbers of two ranks to 64 bits, which look random: SplitMix64's last steps."""
    mixed = np.asarray(source, np.uint64) << np.uint64(32) | np.asarray(target, np.uint64)
    mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
