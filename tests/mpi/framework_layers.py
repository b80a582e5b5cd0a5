"""What programs with a framework's layers share, on the CPU or on GPUs."""

import os

import torch
import torch.distributed as dist


def start_ranks(device):
    """Start the ranks of RANK, WORLD_SIZE...: NCCL where each has a GPU of its own, else gloo."""
    num_gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if num_gpus:
        torch.cuda.set_device(int(os.environ["RANK"]) % num_gpus)
    own_gpu = num_gpus >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if own_gpu else "gloo")


def close_rows(got, want):
    """Compare row by row by norm: a few roundings to BF16, each of 2^-9 at most."""
    got, want = got.detach().float(), want.detach().float()
    assert got.shape == want.shape
    error, size = (got - want).norm(dim=1), want.norm(dim=1)
    wrong = (error > 1e-2 * size).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong[:9]}: errors {error[wrong].tolist()} of {size[wrong].tolist()}"


def equal_rows(got, want):
    """Compare bit by bit, but for the sign of zero."""
    torch.testing.assert_close(got.detach().float(), want.detach().float(), rtol=0, atol=0)
