"""fp4comm: quantized all-to-all for Mixture-of-Experts models."""

from fp4comm import experts, transport
from fp4comm._version import __version__
from fp4comm.all_to_all import AllToAll
from fp4comm.dispatched import Dispatched, Handle, Pending
from fp4comm.formats import WireFormat
from fp4comm.integrations.torch_distributed import all_to_all_rows
from fp4comm.packed import PackedRows, quantize
from fp4comm.precision import Precision

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
