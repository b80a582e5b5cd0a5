"""fp4comm: quantized all-to-all for Mixture-of-Experts models."""

from typing import TYPE_CHECKING, Any

from fp4comm import experts, transport
from fp4comm._version import __version__
from fp4comm.all_to_all import AllToAll
from fp4comm.dispatched import Dispatched, Handle, Pending
from fp4comm.formats import WireFormat
from fp4comm.packed import PackedRows, quantize
from fp4comm.precision import Precision

if TYPE_CHECKING:
    from fp4comm.integrations.torch_distributed import all_to_all_rows

__all__ = [
    "AllToAll",
    "Dispatched",
    "Handle",
    "PackedRows",
    "Pending",
    "Precision",
    "WireFormat",
    "__version__",
    "all_to_all_rows",
    "experts",
    "quantize",
    "transport",
]


def __getattr__(name: str) -> Any:
    """Load what not every program needs when it is asked for."""
    if name == "all_to_all_rows":
        from fp4comm.integrations.torch_distributed import all_to_all_rows

        return all_to_all_rows
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
