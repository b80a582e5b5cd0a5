"""The kernels in ``cuda/``: find them, compile them at first use, load and launch them.

Compiled through `cupy.cuda.nvrtc` with our own options, to a cubin in our own disk cache.  CuPy's
RawKernel would add ``-ftz=true``, which loses subnormals, and its cache does not see an edited
header.  Compiling needs no GPU.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import importlib
import os
import re
import struct
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fp4comm import gpu

FOLDER = Path(__file__).resolve().parent / "cuda"  # in a checkout a link
READ_ONE_BY_ONE = torch.int32, torch.int64  # elements of tables
MIN_CAPABILITY = 8, 0  # Ampere: the first with BF16 arithmetic
OPTIONS = ("-std=c++17", "-ftz=false", "-fmad=false", "-prec-div=true", "-prec-sqrt=true")

Options = tuple[str, ...]  # of the compiler, beside our own

_struct = functools.cache(struct.Struct)
_lock = threading.Lock()
_loaded: dict[tuple[int, str, Options], Kernel] = {}
atexit.register(_loaded.clear)  # modules cannot be unloaded any more when CuPy is gone


def cupy() -> Any:
    """Import CuPy.

    Raises:
        RuntimeError: it is not installed, or not for this machine.
    """
    try:
        return importlib.import_module("cupy")
    except Exception as error:  # half-installed packages fail with any
        why = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"needs CuPy ({why}); {gpu.install()}") from error


def missing() -> str | None:
    """What the kernels lack here, or None if they can run."""
    lacks = gpu.missing()
    if lacks is not None:
        return lacks
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return (
            f"needs a GPU of compute capability {'.'.join(map(str, MIN_CAPABILITY))} or newer, got"
            f" {'.'.join(map(str, capability))} ({torch.cuda.get_device_name()})"
        )
    try:
        _check_driver(cupy())
    except RuntimeError as error:
        return str(error)
    return None


def _check_driver(cp: Any) -> None:
    """A cubin of a newer CUDA than the driver's does not load."""
    try:
        compiler, _ = cp.cuda.nvrtc.getVersion()
    except Exception as error:
        raise RuntimeError(f"needs NVRTC ({str(error).strip()}); {gpu.install()}") from error
    driver = cp.cuda.runtime.driverGetVersion()
    if driver // 1000 < compiler:
        raise RuntimeError(
            f"needs a driver for CUDA {compiler} as the compiler (NVRTC), got one"
            f" for {driver // 1000}.{driver % 1000 // 10}; update the driver or install"
            f" 'fp4comm[cuda{driver // 1000}]'"
        )


def launch(
    name: str,
    options: Options,
    grid: int,
    block: tuple[int, int],
    tensors: Sequence[Any],
    fields: str,
    *numbers: int,
) -> None:
    """Launch a kernel on torch's current stream of its tensors' device, unless the grid is empty.

    Args:
        name: of the kernel.
        options: of its compiler.
        grid: thread blocks.
        block: threads of each, along x and y.
        tensors: the first arguments that the kernel declares: contiguous tensors, or None for a
            null pointer; the first is a tensor.
        fields: types of the others, in letters of `struct`: ``i`` int, ``I`` unsigned int, ``q``
            long long.
        numbers: the others.
    """
    if grid == 0:
        return
    values = []
    copies = []  # live until the launch
    for tensor in tensors:
        address = 0 if tensor is None else tensor.data_ptr()
        if address % gpu.ALIGNMENT and tensor.dtype not in READ_ONE_BY_ONE:
            copies.append(tensor.clone())  # of a view that starts between wide accesses
            address = copies[-1].data_ptr()
        values.append(address)
    device = tensors[0].device.index
    stream = torch._C._cuda_getCurrentRawStream(device)  # a tenth of torch.cuda.current_stream
    form = _struct("P" * len(values) + fields)
    kernel(name, device, options).launch(grid, block, form, (*values, *numbers), stream)


class Kernel:
    """A kernel that is loaded on a device."""

    def __init__(self, name: str, device: int, options: Options) -> None:
        """Compile it, unless the cache has it, and load it."""
        cp = cupy()
        _check_driver(cp)
        with cp.cuda.Device(device) as current:
            path = compile_to_file(name, f"sm_{current.compute_capability}", options)
            self._module = cp.cuda.Module()
            self._module.load_file(str(path))
            self._address = self._module.get_function(name).ptr
        self._device = device
        self._driver, self._runtime = cp.cuda.driver, cp.cuda.runtime

    def launch(
        self,
        grid: int,
        block: tuple[int, int],
        form: struct.Struct,
        values: tuple[int, ...],
        stream: int,
    ) -> None:
        """Launch it.

        CuPy's own launch takes three times as long.

        Args:
            grid: thread blocks.
            block: threads of each, along x and y.
            form: types of the arguments, as the kernel declares them.
            values: the arguments.
            stream: its pointer.
        """
        packed = _packed
        packed.size.value = form.size
        form.pack_into(packed.args, 0, *values)
        before = self._runtime.getDevice()
        self._runtime.setDevice(self._device)  # a new thread has no context before
        try:
            self._driver.launchKernel(
                *(self._address, grid, 1, 1, *block, 1, 0, stream, 0, packed.address)
            )
        finally:
            if before != self._device:
                self._runtime.setDevice(before)


class _Packed(threading.local):
    """Arguments of a launch in the form that the driver takes: one for each thread."""

    BUFFER, SIZE, END = 1, 2, 0  # CU_LAUNCH_PARAM_...

    def __init__(self) -> None:
        self.args = ctypes.create_string_buffer(1024)
        self.size = ctypes.c_size_t()
        args, size = ctypes.addressof(self.args), ctypes.addressof(self.size)
        self._extra = (ctypes.c_void_p * 5)(self.BUFFER, args, self.SIZE, size, self.END)
        self.address = ctypes.addressof(self._extra)


_packed = _Packed()


def kernel(name: str, device: int, options: Options = ()) -> Kernel:
    """Load ``cuda/<name>.cu`` on a device, compiled for it.

    Args:
        name: stem of the file and name of its kernel.
        device: its number.
        options: of the compiler, such as ``-DWIRE=WIRE_MXFP4``.

    Raises:
        RuntimeError: no CuPy, or a driver older than the compiler.
    """
    key = device, name, options
    found = _loaded.get(key)
    if found is None:
        with _lock:
            if key not in _loaded:
                _refuse_capture(name)
                _loaded[key] = Kernel(name, device, options)
            found = _loaded[key]
    return found


def _refuse_capture(name: str) -> None:
    """Loading may wait for the device, which would leave a capture broken."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"cuda/{name}.cu: expected to be loaded before a CUDA graph is captured; call once"
            " outside of the capture first"
        )


def compile_to_file(name: str, arch: str, options: Options = ()) -> Path:
    """Compile a kernel for an architecture such as ``sm_90``, unless the cache has it.

    Returns:
        the cubin.

    Raises:
        RuntimeError: the compiler's log, with what it was asked to compile.
    """
    headers = _headers(name)
    source = headers.pop(f"{name}.cu")
    every = [*OPTIONS, f"--gpu-architecture={arch}", *options]
    version = cupy().cuda.nvrtc.getVersion()
    parts = [name, source, *(part for item in sorted(headers.items()) for part in item)]
    key = hashlib.sha256("\0".join([*parts, *every, repr(version)]).encode()).hexdigest()
    path = _cache_folder() / f"{name}-{arch}-{key[:32]}.cubin"
    if not path.exists():
        _write(path, _compile(name, source, headers, every))
    return path


def _headers(name: str) -> dict[str, str]:
    """The text of a kernel and of every header it includes, by file name."""
    texts: dict[str, str] = {}
    todo = [f"{name}.cu"]
    while todo:
        file = todo.pop()
        if file not in texts:
            texts[file] = (FOLDER / file).read_text()
            todo += re.findall(r'^#include "([^"]+)"', texts[file], re.MULTILINE)
    return texts


def _compile(name: str, source: str, headers: dict[str, str], options: list[str]) -> bytes:
    nvrtc = cupy().cuda.nvrtc
    texts, names = [t.encode() for t in headers.values()], [n.encode() for n in headers]
    program = nvrtc.createProgram(source, f"{name}.cu", texts, names)
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise RuntimeError(f"cuda/{name}.cu: {error} with {' '.join(options)}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def _cache_folder() -> Path:
    """A folder for cubins: the user's cache, or a new temporary one where that is not writable."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    place = Path(base) / "fp4comm"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _temporary_folder()
    return place if os.access(place, os.W_OK) else _temporary_folder()


_temporary: list[Path] = []


def _temporary_folder() -> Path:
    if not _temporary:
        _temporary.append(Path(tempfile.mkdtemp(prefix="fp4comm-")))
    return _temporary[0]


def _write(path: Path, content: bytes) -> None:
    """Write a file that appears whole: several processes may compile the same kernel."""
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
