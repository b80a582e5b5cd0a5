"""Streams, memory and CUDA graphs on ranks that are threads; with NCCL: test_nccl_ranks.py."""

import on_device
import pytest
import ranks
import stream_cases
import torch
from compiled import kernels_are_compiled  # noqa: F401

from fp4comm import transport


@pytest.mark.parametrize("name", stream_cases.CASES)
def test_on_one_rank(name):
    transport.run_local(1, lambda t: stream_cases.run(t, name), timeout_s=60)


OF_A_RANK = [name for name in stream_cases.CASES if name not in stream_cases.OF_A_PROCESS]


@pytest.mark.parametrize("name", OF_A_RANK)
def test_on_two_threads(name):
    stream_cases.expected(stream_cases.CASE, 2)  # once, and not on both
    transport.run_local(2, lambda t: stream_cases.run(t, name), timeout_s=60)


FIRST_CALL_IN_A_CAPTURE = """
import torch
from fp4comm import quantize
x = torch.randn(8, 256, device="cuda").bfloat16()
graph, captured, told = torch.cuda.CUDAGraph(), [], ""
with torch.cuda.graph(graph):
    y = x + 1
    try:
        captured.append(quantize(x, "mxfp4"))
    except RuntimeError as error:
        told = str(error)
assert captured or "outside of the capture" in told, told
want = quantize(x, "mxfp4")
assert torch.equal(want.payload.cpu(), quantize(x.cpu(), "mxfp4").payload)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = quantize(x, "mxfp4")
captured.payload.zero_()
graph.replay()
assert torch.equal(captured.payload, want.payload)
assert torch.equal(captured.scales, want.scales)
print("right")
"""


@pytest.mark.skipif(on_device.DEVICE.type == "cpu", reason="there is no capture on a CPU")
def test_str_16_the_first_call_of_a_process_is_in_a_capture(tmp_path):
    """It works or says to warm up; the capture closes, and the next one holds the call."""
    script = tmp_path / "first_call.py"
    script.write_text(FIRST_CALL_IN_A_CAPTURE)
    done = ranks.python(script, env={"XDG_CACHE_HOME": str(tmp_path)})
    ranks.passed(done)
    assert done.stdout.endswith("right\n"), done.stdout


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_str_12_two_gpus_in_one_process():
    from fp4comm import quantize

    x = torch.randn(8, 256).bfloat16()
    made = [quantize(x.to(f"cuda:{number}")).payload.cpu() for number in (0, 1, 0)]
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
