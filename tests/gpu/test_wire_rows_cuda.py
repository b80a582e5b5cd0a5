"""Handle.topk_idx and combine_wire_rows of CUDA tensors: bytes of the CPU, rows are not copied."""

import pytest
import torch
from compiled import kernels_are_compiled  # noqa: F401

from fp4comm import AllToAll, Precision, transport

EXPERTS, TOPK, HIDDEN = 24, 4, 1024


def send(device, combine, num_tokens=300):
    """Return what each of three ranks gets back, and its wire rows' experts and weights."""

    def on_rank(t):
        g = torch.Generator().manual_seed(t.rank)
        x = torch.randn(num_tokens, HIDDEN, generator=g).bfloat16().to(device)
        idx = torch.randint(-1, EXPERTS, (num_tokens, TOPK), generator=g).to(device)
        weights = torch.rand(idx.shape, generator=g).to(device)
        precision = Precision(combine=combine)
        sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "precision": precision}
        a2a = AllToAll(t, arrive="packed", **sizes)
        d = a2a.dispatch(x, idx, weights)
        out = torch.empty_like(x)
        assert a2a.combine_wire_rows(d.packed.to_bf16(), d.handle, out=out) is out
        return [v.cpu() for v in (out, d.handle.topk_idx, d.handle.topk_weights)]

    return transport.run_local(3, on_rank, timeout_s=60)


@pytest.mark.parametrize("combine", ["bf16", "mxfp4"])
def test_wire_rows_come_back_as_on_the_cpu(combine):
    for got, want in zip(send("cuda", combine), send("cpu", combine), strict=True):
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_rows_are_neither_copied_before_nor_after_the_exchange():
    a2a = AllToAll(transport.open("local"), num_experts=4, hidden=7168, arrive="packed")
    x = torch.randn(2048, 7168, device="cuda").bfloat16()
    d = a2a.dispatch(x, torch.zeros(2048, 1, dtype=torch.int64, device="cuda"))
    rows, out = d.packed.to_bf16(), torch.empty_like(x)
    a2a.combine_wire_rows(rows, d.handle, out=out)  # allocates what stays
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    a2a.combine_wire_rows(rows, d.handle, out=out)
    received = rows.nbytes
    assert torch.cuda.max_memory_allocated() - before < 1.1 * received
