"""The structure: names that every room shares, and imports that go one way."""

import ast
import doctest
import graphlib
import importlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fp4comm"

# What each room may import of fp4comm; a room not named may import all.
ALLOWED = {
    "_version": set(),
    "formats": set(),
    "precision": {"formats"},
    "check": {"formats", "gpu"},
    "eager": set(),
    "gpu": set(),
    "texts": set(),
    "quantities": set(),
    "topology": {"formats", "hops", "quantities"},
    "predict": {"agreement", "bench", "check", "formats", "predict", "routing", "topology"},
    "report": {"_version", "bench", "files", "formats", "predict", "report", "topology"},
    "cuda_kernels": {"gpu"},
    "routing": {"check", "cuda_kernels", "formats", "routing"},
    "transport": {"check", "gpu", "texts", "transport"},
    "codec": {"codec", "cuda_kernels", "formats", "routing"},
    "reference": {"formats", "reference"},
    "packed": {"check", "codec", "formats", "routing"},
    "agreement": {"formats", "precision", "texts", "transport"},
    "hops": {"agreement", "check", "codec", "hops", "routing", "transport"},
    "dispatched": {"eager", "hops", "packed", "precision", "routing", "transport"},
    "caller": {"hops", "transport"},
    "outgoing": {"check", "codec", "transport"},
    "autograd": {"caller", "check", "codec", "dispatched", "formats", "hops", "routing"},
    "all_to_all": {
        "agreement", "autograd", "caller", "check", "codec", "dispatched", "eager", "formats",
        "hops", "outgoing", "packed", "precision", "routing", "transport",
    },
    "products": {"formats", "packed", "routing"},
    "experts": {
        "all_to_all", "autograd", "check", "dispatched", "eager", "products", "routing",
    },
}  # fmt: skip

# Operations that the reference and every codec have under the same name.
OPERATIONS = (
    "quantize_rows",
    "to_fp8_rows",
    "to_bf16_rows",
    "to_fp8_columns",
    "dequantize",
    "row_dots",
    "weighted_reduce",
    "final_reduce",
    "relay_reduce",
)


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path):
    """Rooms of fp4comm that a file imports, wherever in it."""
    for name in imported_names(path):
        parts = name.split(".")
        if parts[0] == "fp4comm" and len(parts) > 1:
            yield parts[1]


def imported_names(path):
    """What a file imports, wherever in it, by its full name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from names


def test_no_import_turns_back():
    files = {file_of(path): path for path in PACKAGE.rglob("*.py")}
    graph = {file: {n for n in imports_of(path) if n in files} for file, path in files.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def file_of(path):
    """Name of the module that a file is."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path):
    """Modules that a file imports, or might import something of; not those that hold it."""
    me = file_of(path)
    for name in imported_names(path):
        for module in (name, name.rpartition(".")[0]):
            if module != me and module != "fp4comm" and not me.startswith(f"{module}."):
                yield module


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_imports_go_one_way(path):
    allowed = ALLOWED.get(room_of(path))
    if allowed is not None:
        assert set(imported_rooms(path)) <= allowed


@pytest.mark.parametrize("room", ["reference", "codec.cpu", "codec.cuda"])
def test_operations_have_one_name_in_every_room(room):
    module = importlib.import_module(f"fp4comm.{room}")
    for name in OPERATIONS:
        assert callable(getattr(module, name)), f"{room} lacks {name}"


def test_every_operation_has_a_benchmark_that_runs(tmp_path):
    result = tmp_path / "codec.json"
    sizes = ["--tokens", "64", "--hidden", "256", "--repeats", "1", "--no-peers"]
    script = ROOT / "benchmarks" / "bench_codec.py"
    done = subprocess.run(
        [sys.executable, script, *sizes, "--json", result], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(result.read_text())["rows"]
    measured = {row["op"].split()[0] for row in rows if "wrong" in row}
    assert measured == set(OPERATIONS)


def test_the_benchmark_of_memory_runs(tmp_path):
    result = tmp_path / "memory.json"
    sizes = ["--tokens", "64", "--hidden", "256", "--wire", "mxfp4", "--json", result]
    script = ROOT / "benchmarks" / "dispatch_memory.py"
    done = subprocess.run([sys.executable, script, *sizes], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    arrivals = [row["arrive"] for row in json.loads(result.read_text())["rows"]]
    assert sorted(arrivals) == ["bf16", "fp8", "packed"]


def test_the_wheel_has_all_that_the_package_reads(tmp_path):
    """Built from a copy, since setuptools writes into the folder that it builds from."""
    copy = tmp_path / "copy"
    skip = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "results", "data")
    shutil.copytree(ROOT, copy, ignore=skip, symlinks=True)
    code = "from setuptools import build_meta as b; b.build_wheel('..')"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    wanted = {f"fp4comm/{name}" for name in ("py.typed", "report/page.html")}
    for root, pattern in (
        (PACKAGE, "**/*.py"),
        (ROOT, "cuda/*.cu*"),
        (ROOT, "topologies/**/*.toml"),
    ):
        wanted |= {f"fp4comm/{file.relative_to(root)}" for file in root.glob(pattern)}
    assert wanted <= names, sorted(wanted - names)
    some = ("cuda/relay_reduce.cu", "hops/auto.py", "predict/plan.py", "topologies/codec/cpu.toml")
    assert {f"fp4comm/{name}" for name in some} <= wanted


def test_no_folder_cuda_shadows_nvidias_namespace_package():
    assert not (ROOT / "cuda" / "__init__.py").exists()


FRAMEWORKS = "megatron", "sglang", "torchtitan", "transformers", "vllm"
WITH_EXAMPLES = sorted(p for p in PACKAGE.rglob("*.py") if ">>>" in p.read_text())


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_in_docstrings(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if path.parent.name == "integrations" and path.stem in FRAMEWORKS:
        pytest.importorskip(path.stem, reason=f"needs {path.stem}")
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0
    assert result.attempted > 0


def test_import_brings_nothing_but_torch_and_numpy():
    """INS-01: everything else is loaded when it is used."""
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import fp4comm\n"
        "tops = {name.split('.')[0] for name in set(sys.modules) - before} - {'fp4comm'}\n"
        "print(sorted(tops - set(sys.stdlib_module_names) - {'torch', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
