"""`AllToAll` for tests that were written for CPU tensors, and the device that the GPU tests use."""

import contextlib
import dataclasses

import torch

import fp4comm

DEVICE = torch.device("cuda")
CYCLES_PER_MS = 2_000_000  # at the highest clock of an H200; slower GPUs are busy for longer


def to(device, value):
    """Put tensors on a device, also those within tuples and dataclasses; leave the rest."""
    if isinstance(value, torch.Tensor):
        return value if value.device.type == "meta" else value.to(device)
    if isinstance(value, tuple):
        return tuple(to(device, part) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(
            value, **{name: to(device, part) for name, part in fields.items()}
        )
    return value


def on_host(d):
    """Bring what a dispatch returned to the CPU; its handle remembers the one it was."""
    tensors = d.rows, d.scales, d.row_weights, d.num_rows, d.expert_offsets, d.packed.payload
    assert {t.device.type for t in tensors if t is not None} == {DEVICE.type}
    handle = dataclasses.replace(d.handle, layout=to("cpu", d.handle.layout))
    object.__setattr__(handle, "on_device", d.handle)
    return dataclasses.replace(
        d,
        rows=to("cpu", d.rows),
        scales=to("cpu", d.scales),
        row_weights=d.row_weights.cpu(),
        num_rows=d.num_rows.cpu(),
        expert_offsets=d.expert_offsets.cpu(),
        packed=to("cpu", d.packed),
        handle=handle,
    )


class AllToAllOnDevice(fp4comm.AllToAll):
    """Takes and returns CPU tensors, as tests have them, and does the work on the device."""

    def dispatch(self, x, topk_idx=None, topk_weights=None, *, handle=None):
        args = [to(DEVICE, part) for part in (x, topk_idx, topk_weights)]
        return on_host(super().dispatch(*args, handle=getattr(handle, "on_device", handle)))

    def combine(self, expert_out, handle, *, weighted=True):
        handle = getattr(handle, "on_device", handle)
        y = super().combine(to(DEVICE, expert_out), handle, weighted=weighted)
        assert y.device.type == DEVICE.type
        return y.cpu()


def busy(num_ms):
    """Keep the current stream busy for about as many milliseconds; the host goes on."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(int(num_ms * CYCLES_PER_MS))


def synchronize():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def side_stream():
    """A context in which another stream than the default one is current."""
    if DEVICE.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream())
    return contextlib.nullcontext()
