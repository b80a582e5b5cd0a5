"""What adapters share: one transport for each process group."""

from __future__ import annotations

import weakref
from typing import Any

from fp4comm import transport
from fp4comm.transport import Transport

# Frameworks hand on the group alone, from layers that know nothing of each other.
_OPENED: weakref.WeakKeyDictionary[Any, Transport] = weakref.WeakKeyDictionary()


def transport_of(group: Any = None) -> Transport:
    """Return the transport of a process group, opened when it is first asked for.

    Collective over the group at that time.  It is closed when nobody holds the group any more; or,
    if the group was destroyed and torch still holds it, when the next one is opened.  After a
    failure that broke it, it stays broken; a new group gets a new one.

    Args:
        group: torch.distributed ProcessGroup; None is WORLD; or a transport, which is returned.

    Raises:
        TypeError, RuntimeError, TimeoutError: as `fp4comm.transport.open`.
    """
    if hasattr(group, "exchange_counts"):
        return group
    if group is None:
        import torch.distributed as dist

        group = dist.group.WORLD if dist.is_available() else None
    found = None if group is None else _OPENED.get(group)
    if found is None:
        _close_those_of_destroyed_groups()
        found = transport.open("torch", group=group)
        weakref.finalize(group, found.close)
        _OPENED[group] = found
    return found


def _close_those_of_destroyed_groups() -> None:
    import torch.distributed as dist

    for group, opened in list(_OPENED.items()):
        try:
            dist.get_backend(group)
        except (RuntimeError, ValueError):  # nothing is initialized, or not this group
            del _OPENED[group]
            opened.close()
