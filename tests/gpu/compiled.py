"""A fixture for modules of the GPU suite: all kernels are in the cache on disk before their tests.

They are compiled side by side; one by one, by each rank, would take longer than ranks may take.
"""

import concurrent.futures

import pytest
import torch

from fp4comm import cuda_kernels
from fp4comm.codec import cuda as codec_cuda
from fp4comm.routing import cuda as routing_cuda


@pytest.fixture(scope="module", autouse=True)
def kernels_are_compiled():
    if cuda_kernels.missing():
        return
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    variants = [*codec_cuda.variants(), *routing_cuda.variants()]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = [pool.submit(cuda_kernels.compile_to_file, n, arch, o) for n, o in variants]
        for each in waiting:
            each.result()
