"""Caller: a rank that makes collective calls over a transport, one named phase after the other."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator

import torch

from fp4comm import hops
from fp4comm.transport import Lent, StoppingPeers, Transport


class Caller:
    """What `AllToAll`, and the backward passes of its calls, do with the transport.

    Attributes:
        timeout_s: seconds that a call waits for a peer.
        timings: a dict that phases add their seconds to, by "operation part", or None.
    """

    timings: dict[str, float] | None = None

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        """Note the transport, and how long to wait for peers."""
        self.timeout_s = timeout_s
        self._transport = transport

    def _phase(
        self, operation: str, part: str, label: str = ""
    ) -> contextlib.AbstractContextManager[None]:
        """Lend the transport our time limit, phase and label, and count the seconds."""
        name = f"{operation} {part}"
        lending = Lent(self._transport, name, self.timeout_s, label)
        return lending if self.timings is None else _timed(name, lending, self.timings)

    def _exchange(self, operation: str, label: str, async_op: bool = False) -> hops.Exchange:
        """Lend a way the transport, with our time limit and this operation's phase and label."""
        phase = functools.partial(self._phase, operation)
        return hops.Exchange(self._transport, phase, label, async_op)

    def _stopping_peers(self, operation: str) -> contextlib.AbstractContextManager[None]:
        """If this rank fails where the others cannot know, tell them."""
        return StoppingPeers(self._transport, operation)


@contextlib.contextmanager
def _timed(name: str, lending: Lent, timings: dict[str, float]) -> Iterator[None]:
    start = _now()
    with lending:
        yield
    timings[name] = timings.get(name, 0.0) + _now() - start


def _now() -> float:
    """Seconds at which the device has done what is queued."""
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # of the device: its next use says so
            torch.cuda.synchronize()
    return time.perf_counter()
