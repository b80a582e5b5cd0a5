"""What adapters share: one transport for each process group; the variable that names the wire."""

from __future__ import annotations

import weakref
from typing import Any

from fp4comm import check, transport
from fp4comm.transport import Transport

WIRE = "FP4COMM_WIRE"  # format of dispatch, where a framework's plugin takes it from

# Frameworks hand on the group alone, from layers that know nothing of each other.
_OPENED: weakref.WeakKeyDictionary[Any, Transport] = weakref.WeakKeyDictionary()


def transport_of(group: Any = None, timeout_s: float = 300.0) -> Transport:
    """Return the transport of a process group, opened when it is first asked for.

    Collective over the group at that time.  It is closed when nobody holds the group any more; or,
    if the group was destroyed and torch still holds it, when the next one is opened.  After a
    failure that broke it, it stays broken; a new group gets a new one.

    Args:
        group: torch.distributed ProcessGroup; None is WORLD; or a transport, which is returned.
        timeout_s: seconds that it waits for a late rank from its opening on, until told otherwise;
            300 if that is no time limit, for all ranks to hear so by the transport.

    Raises:
        TypeError: group is something else, as torch gives to a rank that is not in the group.
        RuntimeError, TimeoutError: as `fp4comm.transport.open`.
    """
    if hasattr(group, "exchange_counts"):
        return group
    try:
        check.seconds("timeout_s", timeout_s)
    except (TypeError, ValueError):
        timeout_s = 300.0
    if group is None:
        import torch.distributed as dist

        group = dist.group.WORLD if dist.is_available() else None
    if group is None:  # there is no WORLD: opening says so
        return transport.open("torch", timeout_s=timeout_s)
    if not isinstance(group, _process_group()):
        raise TypeError(
            "group: expected a torch.distributed ProcessGroup that this rank is in, or a transport,"
            f" got {group!r}"
        )
    found = _OPENED.get(group)
    if found is None:
        _close_those_of_destroyed_groups()
        found = transport.open("torch", group=group, timeout_s=timeout_s)
        weakref.finalize(group, found.close)
        _OPENED[group] = found
    return found


def _process_group() -> tuple[type, ...]:
    import torch.distributed as dist

    return (dist.ProcessGroup,) if dist.is_available() else ()


def _close_those_of_destroyed_groups() -> None:
    import torch.distributed as dist

    for group, opened in list(_OPENED.items()):
        try:
            dist.get_backend(group)
        except (RuntimeError, ValueError):  # nothing is initialized, or not this group
            del _OPENED[group]
            opened.close()
