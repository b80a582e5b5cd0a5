"""The GPU suite: needs an NVIDIA GPU, and says why it skips elsewhere."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # numeric_cases, test_codec

from fp4comm import cuda_kernels


def pytest_collection_modifyitems(items):
    lacks = cuda_kernels.missing()
    if lacks:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=lacks))
