"""The CUDA sources without a GPU: NVRTC compiles every kernel, g++ the functions that set bits."""

import ctypes
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_codec import assert_rows_equal, hard_bf16_rows, hard_f32_rows

from fp4comm import WireFormat, cuda_kernels, reference, routing
from fp4comm.formats import E4M3_NAN, E8M0_NAN

HERE = Path(__file__).resolve().parent
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
MXFP4_RULES = [WireFormat("mxfp4", rule) for rule in ("even", "ceil", "floor")]
by_rule = pytest.mark.parametrize("wire", MXFP4_RULES, ids=lambda w: w.scale_rule)


@pytest.fixture(scope="module", params=[0, 1], ids=["without clipping", "clipping"])
def clips(request):
    return request.param


@pytest.fixture(scope="module")
def host(tmp_path_factory, clips):
    """The device functions, compiled by g++."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("cuda") / f"host{clips}.so"
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    command += [f"-DCLIPS={clips}", "-include", str(HERE / "cuda_shim.h")]
    command += [f"-I{cuda_kernels.FOLDER}"]
    subprocess.run([*command, "-o", str(library), str(HERE / "cuda_host.cpp")], check=True)
    return ctypes.CDLL(str(library))


def call(function, *args):
    function(
        *(
            a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else ctypes.c_int(a)
            for a in args
        )
    )


def quantized(function, wire, *inputs):
    """Quantize blocks of 32 to payload and scales."""
    num_blocks = len(inputs[0])
    payload = np.zeros((num_blocks, wire.payload_bytes(32)), np.uint8)
    scales = np.zeros((num_blocks, 1), np.uint8)
    call(function, *inputs, num_blocks, wire.scale_round, payload, scales)
    return payload, scales


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_with_nvrtc(arch, tmp_path, monkeypatch):
    pytest.importorskip("cupy", reason="needs CuPy (no GPU)")
    codec = importlib.import_module("fp4comm.codec.cuda")
    routing = importlib.import_module("fp4comm.routing.cuda")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, options in [*codec.variants(), *routing.variants()]:
        path = cuda_kernels.compile_to_file(name, arch, options)
        assert path.read_bytes()[:4] == b"\x7fELF"
        assert path.parent == tmp_path / "fp4comm"


@pytest.mark.parametrize(
    ("room", "names", "file"),
    [
        ("codec", ("BLOCK_ROWS", "SCALE_ROWS", "SCALE_GROUPS"), "to_fp8_rows.cu"),
        ("codec", ("PADDING_BLOCKS",), "rows.cuh"),
        ("routing", ("CHUNK_TOKENS",), "experts.cuh"),
        ("routing", ("CHUNK_SLOTS",), "routing.cuh"),
    ],
)
def test_launches_count_as_the_kernels_do(room, names, file):
    module, source = importlib.import_module(f"fp4comm.{room}.cuda"), cuda_kernels.FOLDER / file
    written = dict(re.findall(r"\b([A-Z_]+) = (\d+)", source.read_text()))
    for name in names:
        assert int(written[name]) == getattr(module, name)


LETTERS = {"i64": "q", "int": "i", "u32": "I"}  # of struct


def declared(name):
    """Types of a kernel's arguments: P for pointers, then letters of struct."""
    text = re.sub(r"//.*", "", (cuda_kernels.FOLDER / f"{name}.cu").read_text())
    (arguments,) = re.findall(rf"\b{name}\(([^)]*)\) \{{", text)
    parts = arguments.split(",")
    return "".join("P" if "*" in part else LETTERS[part.split()[0]] for part in parts)


def test_launches_give_the_types_that_kernels_declare(monkeypatch):
    """Of the codec; routing's run in emulated warps, which look at each argument."""
    codec = importlib.import_module("fp4comm.codec.cuda")
    launched = {}

    def launch(name, options, grid, block, tensors, fields, *numbers):
        assert len(fields) == len(numbers)
        assert all(isinstance(number, int) for number in numbers)
        launched[name] = "P" * len(tensors) + fields

    monkeypatch.setattr(cuda_kernels, "launch", launch)
    wire = WireFormat("mxfp4")
    plan = routing.plan(torch.tensor([[0], [1]]), None, routing.Placement(2, 1))
    layout = routing.expert_layout(plan.route, 1, np.array([1, 1]), 128)
    x = torch.ones(2, 128).bfloat16()
    rows = *codec.quantize_rows(x, wire, plan), wire, 128
    codec.to_fp8_rows(*rows, layout, "column")
    codec.to_fp8_columns(*rows, layout)
    codec.dequantize(*rows)
    out = codec.to_bf16_rows(*rows, layout)
    codec.row_dots(*rows, out, layout)
    codec.weighted_reduce(out, layout, wire, weighted=True)
    codec.final_reduce(*rows, plan)
    relay_plan, _ = routing.relay(plan.route, 1, routing.Placement(2, 1), plan.send_splits)
    codec.relay_reduce(*rows, relay_plan)
    assert launched.keys() == {name for name, _ in codec.variants()}
    for name, types in launched.items():
        assert types == declared(name), name


def test_an_edited_header_is_compiled_again(tmp_path, monkeypatch):
    pytest.importorskip("cupy", reason="needs CuPy (no GPU)")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = tmp_path / "cuda"
    shutil.copytree(cuda_kernels.FOLDER, copy)
    monkeypatch.setattr(cuda_kernels, "FOLDER", copy)
    first = cuda_kernels.compile_to_file("slot_counts", "sm_90")
    assert cuda_kernels.compile_to_file("slot_counts", "sm_90") == first
    (copy / "bits.cuh").write_text((copy / "bits.cuh").read_text() + "\n// edited\n")
    assert cuda_kernels.compile_to_file("slot_counts", "sm_90") != first


def test_a_kernel_that_does_not_compile_shows_the_compilers_log(tmp_path, monkeypatch):
    pytest.importorskip("cupy", reason="needs CuPy (no GPU)")
    (tmp_path / "wrong.cu").write_text("nonsense;\n")
    monkeypatch.setattr(cuda_kernels, "FOLDER", tmp_path)
    with pytest.raises(RuntimeError, match=r"cuda/wrong\.cu: .*sm_90(.|\n)*nonsense"):
        cuda_kernels.compile_to_file("wrong", "sm_90")


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cuda_kernels.torch.version, "cuda", "13.0")
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"needs CuPy .*pip install 'fp4comm\[cuda13\]'"):
        cuda_kernels.cupy()


def test_a_broken_cupy_is_told_like_a_missing_one(tmp_path, monkeypatch):
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise AttributeError('half installed')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RuntimeError, match=r"needs CuPy \(AttributeError: half installed\); pip"):
        cuda_kernels.cupy()


@by_rule
def test_mxfp4_of_any_bf16_as_the_reference(host, clips, wire):
    if wire.scale_rule == "floor" and not clips:
        pytest.skip("floor is compiled with clipping")
    bits = hard_bf16_rows(32)
    got = quantized(host.mxfp4_from_bf16, wire, bits)
    assert_rows_equal(got, reference.quantize_rows(bits, wire))


@pytest.mark.parametrize(
    "wire", [*MXFP4_RULES, WireFormat("mxfp8", "ceil"), WireFormat("mxfp8", "floor")], ids=str
)
def test_codes_of_any_float32_as_the_reference(host, clips, wire):
    if wire.name == "mxfp4" and wire.scale_rule == "floor" and not clips:
        pytest.skip("floor is compiled with clipping")
    values = hard_f32_rows(32)
    got = quantized(getattr(host, f"{wire.name}_from_f32"), wire, values)
    assert_rows_equal(got, reference.quantize_rows(values, wire))


@by_rule
def test_mxfp4_of_any_e4m3_code_and_scale_as_the_reference(host, clips, wire):
    """All codes under scale mantissas beside each ratio of a midpoint and a code, and others."""
    if wire.scale_rule == "floor" and not clips:
        pytest.skip("floor is compiled with clipping")
    rng = np.random.default_rng(1)
    ratios = [m / c * (1 if m >= c else 2) for m in (8, 10, 12, 14) for c in range(8, 16)]
    near = np.float32(ratios).view(np.uint32) & 0x7FFFFF
    mantissas = (near[:, None].astype(np.int64) + np.arange(-3, 4)).reshape(-1) & 0x7FFFFF
    edges = ((np.arange(256)[:, None] << 15) + [-1, 0, 1]).reshape(-1) & 0x7FFFFF
    mantissas = np.concatenate([mantissas, edges, rng.integers(0, 1 << 23, 2000)])
    exponents = rng.choice([0, 1, 2, 60, 127, 128, 200, 250, 254, 255], len(mantissas))
    exponents[::2] = 127
    x_scales = (exponents << 23 | mantissas).astype(np.uint32).view(np.float32)
    for low, high in [(0, 128), (0x18, 0x28), (0x70, 0x7F), (0, 0x10)]:
        codes = rng.integers(low, high, (len(mantissas), 32), dtype=np.uint8)
        codes |= rng.choice(np.uint8([0, 0x80]), codes.shape)
        got = quantized(host.mxfp4_from_e4m3, wire, codes, x_scales)
        assert_rows_equal(got, reference.quantize_rows((codes, x_scales[:, None]), wire))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_arrival_of_every_code_at_every_gap(host, name):
    """Every code in a block that lies 0 to 24 binades below another, and beside one of NaN."""
    wire = WireFormat(name)
    every = np.arange(256, dtype=np.uint8).reshape(-1, wire.payload_bytes(32))
    blocks, others = [], []
    for largest in (1, 5, 6, 7, 8, 30, 254, E8M0_NAN):
        for gap in range(25):
            scale = E8M0_NAN if largest == E8M0_NAN else max(largest - gap, 0)
            blocks += [scale] * len(every)
            others += [0 if largest == E8M0_NAN else largest] * len(every)
    payload = np.tile(every, (len(blocks) // len(every), 1))
    scales, others = np.array(blocks, np.uint8), np.array(others, np.uint8)
    headroom = wire.format.element.headroom
    shared = np.maximum(others.astype(int) - headroom, 1).astype(np.uint8)
    codes = np.zeros((len(payload), 32), np.uint8)
    call(getattr(host, f"e4m3_from_{name}"), payload, scales, shared, len(payload), codes)
    # The reference sees a group: the block, and one of zeros with the largest scale.
    rows = np.concatenate([payload, np.zeros_like(payload)], axis=1)
    want, _ = reference.to_fp8_rows(rows, np.stack([scales, others], axis=1), wire, 64)
    assert_rows_equal((codes,), (want[:, :32],))
    assert (codes[scales == E8M0_NAN] == E4M3_NAN).all()


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_decodes_every_code_under_every_scale(host, name):
    wire = WireFormat(name)
    every = np.arange(256, dtype=np.uint8).reshape(-1, wire.payload_bytes(32))
    payload = np.tile(every, (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8), len(every))
    values = np.zeros((len(payload), 32), np.float32)
    call(getattr(host, f"f32_from_{name}"), payload, scales, len(payload), values)
    values[np.isnan(values)] = np.uint32(0x7FC00000).view(np.float32)
    want = reference.dequantize(payload, scales[:, None], wire, 32)
    assert_rows_equal((values,), (want,))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_adds_every_code_under_every_scale_up_to_the_last_exact_one(host, name):
    """To zeros, to other sums near and far, and to those that leave nothing."""
    wire, rng = WireFormat(name), np.random.default_rng(1)
    text = (cuda_kernels.FOLDER / "formats.cuh").read_text()
    last = int(re.search(r"LAST_EXACT_SCALE = (\d+);", text)[1])
    every = np.arange(256, dtype=np.uint8).reshape(-1, wire.payload_bytes(32))
    payload = np.tile(every, (last + 1, 1))
    scales = np.repeat(np.arange(last + 1, dtype=np.uint8), len(every))
    values = reference.dequantize(payload, scales[:, None], wire, 32)
    mantissas = rng.integers(0, 1 << 24, values.shape) << 8  # and signs
    exponents = np.clip(scales[:, None] + rng.integers(-30, 31, values.shape), 0, 253)
    others = (mantissas & 0x807FFFFF | exponents << 23).astype(np.uint32).view(np.float32)
    for start in (np.zeros_like(values), others, -values):
        got = start + np.float32(0)  # no sum is -0
        want = got + values
        call(getattr(host, f"add_{name}"), payload, scales, len(payload), got)
        for sums in (got, want):
            sums[np.isnan(sums)] = np.uint32(0x7FC00000).view(np.float32)
        assert_rows_equal((got,), (want,))


def test_rounds_any_float32_to_bf16(host):
    values = hard_f32_rows(32).reshape(-1)
    bits = np.zeros(len(values), np.uint16)
    call(host.bf16_from_f32, values, len(values), bits)
    assert_rows_equal((bits[:, None],), (reference.float32_to_bf16(values)[:, None],))
