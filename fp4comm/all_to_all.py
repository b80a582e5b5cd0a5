"""AllToAll: dispatch tokens to their experts, combine their outputs.  The flow, top to bottom.

topk_idx -> plan -> quantize -> exchange -> arrive -> experts -> reduce -> exchange -> reduce
            routing  codec      transport   codec     (caller)   codec     transport   codec
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, overload

import numpy as np
import torch

from fp4comm import agreement, autograd, check, codec, hops
from fp4comm.caller import Caller
from fp4comm.dispatched import Dispatched, Handle, Pending
from fp4comm.eager import uncompiled
from fp4comm.formats import WireFormat
from fp4comm.outgoing import autocast, check_device
from fp4comm.packed import SCALE_LAYOUTS, PackedRows
from fp4comm.precision import Precision
from fp4comm.routing import Placement, RelayPlan, RoutePlan
from fp4comm.transport import Transport

ARRIVALS = ("fp8", "bf16", "packed")


class AllToAll(Caller):
    """Quantized dispatch and combine of one kind of MoE layer over a transport.

    Experts stand on ranks in contiguous ranges; where ``num_experts`` is not divisible, the first
    ranks hold one more.  Collective: all ranks make it, and call its methods, in the same order.

    Args:
        transport: from `fp4comm.transport.open` or `run_local`.
        num_experts: experts on all ranks together, at most 32767 a rank.
        hidden: elements in a token, a multiple of 32.
        precision: wire format of each pass and direction.
        arrive: what dispatch returns: ``"fp8"`` (E4M3 rows with a float32 scale per 128),
            ``"bf16"`` or ``"packed"`` (the wire rows alone).
        expert_alignment: rows that each expert's segment starts at a multiple of.
        scale_layout: of FP8 rows: ``"row"``, or ``"column"`` with strides ``(1, M)``.
        timeout_s: seconds that a call waits for a peer; overrides the transport's during the call.
        route: ``"flat"``: a token goes straight to each rank that has one of its experts;
            ``"two_hop"``: once to each node, and on from there, see `fp4comm.hops`; ``"auto"``:
            the faster one in each dispatch, by its counts and the links.  Rows that arrive are the
            same; combine's sums by the two-hop route are rounded to its wire once more.
        ranks_per_node: for the latter two, how many consecutive ranks a node has, or a list with
            the ranks of each; None: those are on a node whose hosts have the same name, which
            NCCL_HOSTID sets as it does for NCCL.
        links: for ``"auto"``, what a rank can send.

    Attributes:
        timings: a dict that calls add their seconds to, by "operation part" (``"dispatch
            quantize"``), or None.  On a GPU each part then waits for the device.

    Raises:
        ValueError, TypeError: on all ranks alike, if one rank's arguments are wrong, or if
            num_experts, hidden, precision or route differ, or the ranks of a node are not
            consecutive.
        TimeoutError: a peer did not come.

    Example: one rank, one token, two experts of four.
        >>> import torch
        >>> from fp4comm import AllToAll, transport
        >>> a2a = AllToAll(transport.open("local"), num_experts=4, hidden=32, arrive="bf16")
        >>> d = a2a.dispatch(torch.ones(1, 32).bfloat16(), torch.tensor([[0, 2]]),
        ...                  torch.tensor([[0.25, 0.75]]))
        >>> d.num_rows_list, tuple(d.rows.shape)
        ([1, 0, 1, 0], (256, 32))
        >>> a2a.combine(d.rows, d.handle)[0, 0].item()
        1.0
    """

    def __init__(
        self,
        transport: Transport,
        *,
        num_experts: int,
        hidden: int,
        precision: Precision = Precision(),  # noqa: B008  frozen
        arrive: str = "fp8",
        expert_alignment: int = 128,
        scale_layout: str = "row",
        timeout_s: float = 300.0,
        route: str = "flat",
        ranks_per_node: int | Sequence[int] | None = None,
        links: hops.Links = hops.Links(),  # noqa: B008  frozen
    ) -> None:
        """Check the arguments together with the other ranks."""
        check.transport(transport)
        super().__init__(transport, timeout_s)
        self.num_experts = num_experts
        self.hidden = hidden
        self.precision = precision
        self.arrive = arrive
        self.expert_alignment = expert_alignment
        self.scale_layout = scale_layout
        self.route = route
        self.links = links
        self._ranks_per_node = ranks_per_node
        self._node_sizes: tuple[int, ...] | None = None  # None: not given, and not looked for
        self._is_open = True
        self._num_calls = 0
        self._number = 0
        failure = _failure_of(self._check_arguments)
        if failure is not None:
            self.timeout_s = transport.timeout_s
        with self._phase("AllToAll(...)", "counts"):
            drawn = np.full((transport.num_ranks, 1), random.SystemRandom().getrandbits(62))
            mine = self._fingerprint(agreement.MAKE, failure)
            self._number = int(agreement.agree(transport, mine, drawn, failure)[0, 0])
            self._placement = Placement(self.num_experts, transport.num_ranks)
            self._route = self._make_route()

    @overload
    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        handle: Handle | None = None,
        async_op: Literal[False] = False,
    ) -> Dispatched: ...

    @overload
    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        handle: Handle | None = None,
        async_op: Literal[True],
    ) -> Pending[Dispatched]: ...

    @uncompiled
    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        handle: Handle | None = None,
        async_op: bool = False,
    ) -> Dispatched | Pending[Dispatched]:
        """Send each token once to every rank that holds one of its experts, in the wire format.

        Rows arrive expert-major, see `Dispatched`.  An expert twice in a token makes two rows.
        On a GPU the work is queued on the current stream; the host waits for the counts alone.
        With ``arrive="bf16"`` it is differentiable, straight through the quantization: gradients of
        ``rows`` and ``row_weights`` come back to x and topk_weights, in their dtypes.  Backward
        passes are collective too: all ranks make them, in the same order; one that fails, a second
        one through a freed graph too, stops the peers and leaves the transport broken.

        Args:
            x: ``[T, hidden]`` bfloat16, or a pair of float8_e4m3fn codes ``[T, hidden]`` and
                float32 scales ``[T, ceil(hidden / 128)]``; any strides; T may be 0 and differ
                between ranks.  Under autocast float32 and float16 are cast.
            topk_idx: ``[T, K]`` int32 or int64 expert, or -1 for none; K the same on all ranks.
            topk_weights: ``[T, K]``, any float dtype, kept in float32; travels with the rows, for
                combine.  None, on all ranks: ones, and nothing travels.
            handle: of an earlier dispatch, instead of the two: same routing and weights again,
                without plan and counts; the weights are detached.
            async_op: do not make the current stream wait for the exchange: ``Pending.wait()``
                does.  On the CPU the exchange is over when this returns.

        Returns:
            `Dispatched`; with async_op a `Pending`, whose ``wait()`` returns it.

        Raises:
            ValueError, TypeError, RuntimeError: on all ranks alike, naming rank and argument, also
                if only some ranks want gradients, or if they are wanted of rows that do not arrive
                as BF16; nothing was sent and the object stays usable.  With a handle: on the rank
                with the mistake; its peers are stopped, and the transport is broken.
            TimeoutError: naming rank, phase and peer, if one does not come within ``timeout_s``.

        Bytes a wire row: `WireFormat.row_bytes`, at hidden 7168 3808 in mxfp4 and 14336 in bf16;
        and 6 (2 without weights) of route a slot.  Source: OCP MX v1.0 for the formats.
        """
        if handle is None:
            checks = autograd.checked_inputs(self.arrive, x, topk_weights)
            pending = self._dispatch(x, topk_idx, topk_weights, checks, async_op=async_op)
        else:
            pending = self._dispatch_again(x, topk_idx, topk_weights, handle, async_op)
        return pending if async_op else pending.wait()

    @overload
    def combine(
        self,
        expert_out: Any,
        handle: Handle,
        *,
        weighted: bool = True,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def combine(
        self, expert_out: Any, handle: Handle, *, weighted: bool = True, async_op: Literal[True]
    ) -> Pending[torch.Tensor]: ...

    @uncompiled
    def combine(
        self, expert_out: Any, handle: Handle, *, weighted: bool = True, async_op: bool = False
    ) -> torch.Tensor | Pending[torch.Tensor]:
        """Send the experts' outputs back to their tokens and sum them.

        On the experts' rank the slots of a wire row are weighted and summed in float32, by
        ascending slot; the sum travels in the combine wire format; at the source the ranks' rows
        are summed in float32, by ascending rank, and rounded to BF16.  It is differentiable; the
        gradient of y goes to the experts' ranks in the wire format combine_grad.  Several combines
        of one dispatch have to be made in the same order on all ranks, as nothing tells them apart.

        Args:
            expert_out: ``[M, hidden]`` bfloat16, what the experts made of the dispatched rows;
                padding rows are not read.
            handle: of the dispatch.
            weighted: multiply by the routing weights, and keep expert_out if those want a gradient;
                False sums as they are, and keeps nothing.
            async_op: as for `dispatch`; where weights want a gradient, expert_out may not change
                until ``wait()``.

        Returns:
            ``[T, hidden]`` bfloat16, +0 for a token without experts; with async_op a `Pending`,
            whose ``wait()`` returns it.

        Raises:
            ValueError, TypeError, RuntimeError: on the rank with the mistake; its peers raise
                ``stopped by rank r: ...``, and the transport is broken.
            TimeoutError: as for `dispatch`.
        """
        self._num_calls += 1
        with self._stopping_peers("combine"):
            self._check_handle(handle)
            check.no_tangent("expert_out", expert_out)
            layout = handle.layout
            rows = check.expert_out(expert_out, layout.num_expert_rows, self.hidden, handle._device)
            wire, implementation = WireFormat.of(self.precision.combine), codec.of(handle._device)
            with self._phase("combine", "reduce"):
                sent = implementation.weighted_reduce(rows, layout, wire, weighted=weighted)
            outputs = autograd.Outputs.of(expert_out, rows, handle, weighted)
            kind = "weighted" if weighted else "unweighted"
            name = f"{kind} combine {self._num_calls} of {handle._name}"
            label = name + ("" if outputs is None else ", with gradient")

            def of_y(y: torch.Tensor) -> torch.Tensor:
                if outputs is None:
                    return y
                return autograd.of_combine(self, y, outputs, handle, weighted, name)

            pending = self._send_back([*sent], handle, label, async_op, of_y)
        return pending if async_op else pending.wait()

    @overload
    def combine_wire_rows(
        self,
        rows: Any,
        handle: Handle,
        *,
        out: torch.Tensor | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def combine_wire_rows(
        self,
        rows: Any,
        handle: Handle,
        *,
        out: torch.Tensor | None = None,
        async_op: Literal[True],
    ) -> Pending[torch.Tensor]: ...

    @uncompiled
    def combine_wire_rows(
        self,
        rows: Any,
        handle: Handle,
        *,
        out: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | Pending[torch.Tensor]:
        """Send back one row for each wire row that arrived, and sum those of a token.

        For experts that take the wire rows as they came (``d.packed``, `Handle.topk_idx`) and
        weight and sum the outputs of their slots themselves.  On the bf16 wire the rows are sent
        from where they are, without a copy.  Not differentiable.

        Args:
            rows: ``[n, hidden]`` bfloat16, weighted and summed over the local experts of each wire
                row, in the order of ``d.packed``.
            handle: of the dispatch.
            out: ``[T, hidden]`` bfloat16, contiguous, to be written and returned; None: a new one.
            async_op: as for `dispatch`; rows may not change until ``wait()``.

        Returns, Raises: as for `combine`; RuntimeError also if rows want a gradient.
        """
        self._num_calls += 1
        with self._stopping_peers("combine"):
            self._check_handle(handle)
            check.no_tangent("rows", rows)
            check.no_gradient("rows", rows, reason="combine_wire_rows is not differentiable")
            num_rows, device = len(handle.layout.slot_rows), handle._device
            rows = check.expert_out(rows, num_rows, self.hidden, device, "rows", "wire rows")
            if out is not None:
                check.no_gradient("out", out, reason="it is written in place")
                check.out("out", out, (handle._plan.num_tokens, self.hidden), device)
            wire, implementation = WireFormat.of(self.precision.combine), codec.of(device)
            if wire.name == "bf16":
                payload = rows.view(torch.uint8)
                sent = payload, payload.new_empty((num_rows, 0))
            else:
                with self._phase("combine", "reduce"):
                    sent = implementation.quantize_rows(rows, wire)
            label = f"combine of wire rows {self._num_calls} of {handle._name}"
            pending = self._send_back([*sent], handle, label, async_op, out=out)
        return pending if async_op else pending.wait()

    def __copy__(self) -> AllToAll:
        """Return itself: copies of a model send by the same object."""
        return self

    def __deepcopy__(self, memo: Any) -> AllToAll:
        """Likewise."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: its transport belongs to this process."""
        raise TypeError(
            "AllToAll: expected to stay in its process, as its transport does, got pickled (of a"
            " model save state_dict(), not the whole)"
        )

    def close(self) -> None:
        """Refuse further calls.  The transport stays open: others may use it."""
        self._is_open = False

    def __enter__(self) -> AllToAll:
        """Use as a context manager."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    # The parts of the flow

    @uncompiled
    def _dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        checks: contextlib.AbstractContextManager[None],
        *,
        arrive: str | None = None,
        async_op: bool = False,
    ) -> Pending[Dispatched]:
        """Dispatch with checks of a caller within this package.

        Args:
            x, topk_idx, topk_weights, async_op: as for `dispatch`.
            checks: entered before our own on this rank and left behind them; what it raises is
                raised on all ranks, as what they raise is.
            arrive: another arrival than the object's.

        Raises:
            as `dispatch`.
        """
        rows, draft, sent, inputs, failure = self._prepare(x, topk_idx, topk_weights, checks)
        with self._phase("dispatch", "counts"):
            mine = self._fingerprint(agreement.DISPATCH, failure, rows, draft, topk_weights, inputs)
            nothing = np.zeros((self._transport.num_ranks, 0), np.int64)
            told = nothing if draft is None else draft.counts
            counts = agreement.agree(self._transport, mine, told, failure)
        assert rows is not None  # else agree has raised
        assert draft is not None
        self._num_calls += 1
        device = check.codes(rows).device
        name = f"dispatch {self._num_calls} of AllToAll {self._number % 10**6}"
        with self._stopping_peers("dispatch"):
            settled = draft.settled(counts)
            plan = settled.plan
            sent = sent or self._quantize(rows, plan)
            exchange = self._exchange("dispatch", "dispatch", async_op)
            way, received = settled.send(counts, [*sent], exchange)

        def finish() -> Dispatched:
            *wire_rows, route = received
            num_rows, alignment = self._local(counts[:, 1:]).sum(0), self.expert_alignment
            with self._stopping_peers("dispatch"), self._phase("dispatch", "arrive"):
                layout = way.layout(route, plan.num_topk, num_rows, alignment)
                of_all = self._transport, self.num_experts, self.hidden, self.precision
                handle = Handle(layout, plan, way, *of_all, alignment, device, name)
                d = self._arrive(wire_rows, handle, arrive or self.arrive)
            return autograd.of_dispatch(self, d, inputs, name) if inputs.wanted else d

        return Pending(exchange.work, [*received, *way.tables], finish)

    def _prepare(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        checks: contextlib.AbstractContextManager[None],
    ) -> tuple[check.Rows | None, hops.Draft | None, hops.Rows, autograd.Inputs, Exception | None]:
        """Check, plan and quantize; a mistake is returned, for all ranks to raise together."""
        try:
            with self._phase("dispatch", "plan"), checks:
                self._check_open()
                rows = self._rows(x)
                codes = check.codes(rows)
                idx = check.topk_idx(topk_idx, len(codes), codes.device)
                weights = None if topk_weights is None else check.topk_weights(topk_weights, idx)
                inputs = autograd.Inputs.of(x, topk_weights)
                draft = self._route.draft(idx, weights)
            sent = [] if draft.plan is None else self._quantize(rows, draft.plan)
        except Exception as failure:
            return None, None, [], autograd.NONE, failure
        return rows, draft, sent, inputs, None

    def _quantize(self, rows: check.Rows, plan: RoutePlan) -> hops.Rows:
        wire, device = WireFormat.of(self.precision.dispatch), check.codes(rows).device
        with self._phase("dispatch", "quantize"):
            return [*codec.of(device).quantize_rows(rows, wire, plan)]

    def _send_back(
        self,
        sent: hops.Rows,
        handle: Handle,
        label: str,
        async_op: bool,
        of_y: Callable[[torch.Tensor], torch.Tensor] = lambda y: y,
        out: torch.Tensor | None = None,
    ) -> Pending[torch.Tensor]:
        """Send wire rows of combine back, sum those of each token, return ``of_y`` of the sums."""
        plan, way = handle._plan, handle._way
        wire, implementation = WireFormat.of(self.precision.combine), codec.of(handle._device)

        def merge(came: hops.Rows, relay: RelayPlan) -> hops.Rows:
            return [*implementation.relay_reduce(*came, wire, self.hidden, relay)]

        exchange = self._exchange("combine", label, async_op)
        received = way.back(sent, exchange, merge)

        def finish() -> torch.Tensor:
            with self._stopping_peers("combine"), self._phase("combine", "reduce"):
                y = implementation.final_reduce(*received, wire, self.hidden, plan, out)
                if out is not None:
                    torch.autograd.graph.increment_version(out)  # kernels write past autograd
            return of_y(y)

        tables = [plan.place_offsets, plan.places, *way.tables]
        return Pending(exchange.work, [*received, *tables], finish)

    def _arrive(self, received: list[torch.Tensor], handle: Handle, arrive: str) -> Dispatched:
        """Convert the wire rows to what the experts take."""
        layout, wire = handle.layout, WireFormat.of(self.precision.dispatch)
        payload, scales_received = received
        packed = PackedRows(payload, scales_received, wire, self.hidden)
        rows = scales = None
        if arrive == "fp8":
            rows, scales = packed.to_fp8_rows(layout, self.scale_layout)
        elif arrive == "bf16":
            rows = packed.to_bf16(layout)
        return Dispatched(
            rows=rows,
            scales=scales,
            row_weights=layout.row_weights,
            num_rows=layout.num_rows,
            num_rows_list=layout.num_rows_list,
            expert_offsets=layout.expert_offsets,
            packed=packed,
            handle=handle,
        )

    def _dispatch_again(
        self, x: Any, topk_idx: Any, topk_weights: Any, handle: Handle, async_op: bool
    ) -> Pending[Dispatched]:
        """Dispatch with an earlier dispatch's routing: no plan, no counts, no route."""
        self._num_calls += 1
        with self._stopping_peers("dispatch"):
            if topk_idx is not None or topk_weights is not None:
                raise ValueError("handle: expected without topk_idx and topk_weights")
            self._check_handle(handle, expert_alignment=self.expert_alignment)
            autograd.check_inputs(self.arrive, x)
            rows = self._rows(x)
            plan, way = handle._plan, handle._way
            codes, made_for = check.codes(rows), "which handle was made for"
            if len(codes) != plan.num_tokens:
                raise ValueError(
                    f"x: expected {plan.num_tokens} tokens, {made_for}, got {len(codes)}"
                )
            if codes.device != handle._device:
                raise ValueError(f"x: expected on {handle._device}, {made_for}, got {codes.device}")
            sent = self._quantize(rows, plan)
            inputs = autograd.Inputs.of(x)
            if inputs.wanted:
                check.no_inference("handle", handle.layout.num_rows)
            name = f"dispatch {self._num_calls} like {handle._name}"
            label = f"dispatch again like {handle._name}{', with gradient' * inputs.wanted}"
            exchange = self._exchange("dispatch", label, async_op)
            received = way.forth(sent, exchange)

        def finish() -> Dispatched:
            with self._stopping_peers("dispatch"), self._phase("dispatch", "arrive"):
                d = self._arrive(received, handle.detached(), self.arrive)
            return autograd.of_dispatch(self, d, inputs, name) if inputs.wanted else d

        tables = handle.layout.slot_rows, handle.layout.padding, *way.tables
        return Pending(exchange.work, [*received, *tables], finish)

    # Checks and bookkeeping

    def _rows(self, x: Any) -> check.Rows:
        rows = check.rows_or_pair("x", autocast(x), (torch.bfloat16,), self.hidden)
        check_device(self._transport, "x", check.codes(rows).device)
        return rows

    def _check_arguments(self) -> None:
        self.num_experts = check.positive_int("num_experts", self.num_experts)
        self.hidden = check.hidden(self.hidden)
        self.expert_alignment = check.positive_int("expert_alignment", self.expert_alignment)
        check.one_of("arrive", self.arrive, ARRIVALS)
        check.one_of("scale_layout", self.scale_layout, SCALE_LAYOUTS)
        if not isinstance(self.precision, Precision):
            raise TypeError(f"precision: expected a Precision, got {type(self.precision).__name__}")
        num_ranks = self._transport.num_ranks
        check.local_experts("num_experts", self.num_experts, num_ranks)
        check.seconds("timeout_s", self.timeout_s)
        check.one_of("route", self.route, hops.ROUTES)
        self._node_sizes = hops.check_ranks_per_node(self._ranks_per_node, num_ranks)
        if not isinstance(self.links, hops.Links):
            raise TypeError(f"links: expected Links, got {type(self.links).__name__}")

    def _make_route(self) -> hops.Route:
        """Find the nodes, if they matter, and make what plans; errors are the same on all ranks."""
        sizes: Sequence[int] = self._node_sizes or ()
        if self.route != "flat" and not sizes:
            sizes = hops.find_nodes(self._transport)
        precision, hidden = self.precision, self.hidden
        wires = WireFormat.of(precision.dispatch), WireFormat.of(precision.combine)
        there_and_back = sum(wire.row_bytes(hidden) for wire in wires)
        return hops.make(
            self.route,
            self._placement,
            sizes,
            self._transport.rank,
            lambda rows: hops.two_hop_is_faster(rows, there_and_back, self.links),
        )

    def _nodes_hash(self) -> int:
        """Hash what a rank chooses its route by; 0 for the flat one."""
        if self.route == "flat":
            return 0
        return zlib.crc32(repr((self._node_sizes, self.links)).encode())

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("AllToAll: expected an open object, got a closed one")

    def _check_handle(self, handle: Handle, **more: Any) -> None:
        self._check_open()
        if not isinstance(handle, Handle):
            raise TypeError(f"handle: expected a Handle, got {type(handle).__name__}")
        of_all = {"num_experts": self.num_experts, "hidden": self.hidden}
        handle._check_use(self._transport, **of_all, precision=self.precision, **more)

    def _fingerprint(
        self,
        operation: int,
        failure: Exception | None,
        rows: check.Rows | None = None,
        draft: hops.Draft | None = None,
        topk_weights: Any = None,
        inputs: autograd.Inputs = autograd.NONE,
    ) -> agreement.Fingerprint:
        if failure is not None:  # nobody will compare it
            return agreement.Fingerprint(operation)
        return agreement.Fingerprint(
            operation,
            self._number,
            self._num_calls,
            self._transport.history,
            self.num_experts,
            self.hidden,
            **agreement.wire_numbers(self.precision),
            route=hops.ROUTES.index(self.route),
            nodes=self._nodes_hash(),
            dtype=int(isinstance(rows, tuple)),
            device=int(rows is not None and check.codes(rows).is_cuda),
            topk=0 if draft is None else draft.num_topk,
            weights=int(topk_weights is None),
            gradient=inputs.wanted,
        )

    def _local(self, counts: Any) -> Any:
        """Columns of this rank's experts: ranks with fewer leave the last one empty."""
        return counts[:, : self._placement.num_local_experts(self._transport.rank)]


def _failure_of(checks: Any) -> Exception | None:
    try:
        checks()
    except Exception as failure:
        return failure
    return None
