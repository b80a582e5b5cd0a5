"""all_to_all_rows on process groups of torch.distributed, beside its own all-to-all."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import conformance
import numpy as np
import row_exchanges
import torch
import torch.distributed as dist
from transport_cases import raises

from fp4comm import all_to_all_rows
from fp4comm.integrations._common import transport_of

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
rng = np.random.default_rng(2)
for _ in range(3):
    splits = rng.integers(0, 30, (num_ranks, num_ranks)).tolist()
    row_exchanges.check_rows(None, transport_of(), splits, "mxfp4", "fp8")
assert transport_of(dist.group.WORLD) is transport_of()

pair = dist.new_group([0, 2])
if rank in (0, 2):
    row_exchanges.check_rows(pair, transport_of(pair), [[1, 2], [0, 4]], "mxfp8", "bf16")
    assert transport_of(pair).num_ranks == 2

# In the place of torch's own, forth and back: small integers are exact in all formats.
send, recv = splits[rank], [row[rank] for row in splits]
x = torch.randint(-4, 5, (sum(send), 64)).bfloat16().requires_grad_()
y = all_to_all_rows(x, send, recv, grad_wire="mxfp4")
plain, plain_grad = torch.empty_like(y), torch.empty_like(x)
dist.all_to_all_single(plain, x.detach(), recv, send)
assert torch.equal(y, plain)
y.backward(plain.sign())
dist.all_to_all_single(plain_grad, plain.sign(), send, recv)
assert torch.equal(x.grad, plain_grad)

wrong = {"timeout_s": True} if rank == 1 else {}  # in the call that opens the transport
with raises(TypeError, f"rank 1 of {num_ranks}: timeout_s: expected a number of seconds, got bool"):
    all_to_all_rows(x, send, recv, dist.new_group(), **wrong)

moe = row_exchanges.layer(None, transport_of(), 6, "mxfp4", "bf16")
conformance.check(moe, transport_of(), num_experts=6, hidden=32, trains=True, num_random=4)

del moe
dist.barrier()
if rank in (0, 2):
    opened = transport_of(pair)
    dist.destroy_process_group(pair)
    transport_of(dist.new_group([0, 2], use_local_synchronization=True))
    with raises(RuntimeError, 'transport "torch": closed'):
        opened.exchange_counts([[0]] * 2)
dist.barrier()
