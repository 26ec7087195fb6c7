"""Compile every kernel that a launcher starts, for a GPU that is not there, and read its registers, stack and
memory."""

import contextlib
import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from kernels.triton import config_table

MODULES = (
    "softmax_attention", "linear_attention_launch", "selective_scan", "causal_conv", "decode",
    "cross_entropy", "softmax_matches", "decode_attention", "gated_silu", "rms_norm", "rotation",
    "step_size", "feature_maps", "linear_matches", "column_sums", "step_decay", "scaled_rows",
    "packed_linear_attention", "packed_gated_silu", "embedding",
)  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}


class _Driver:
    """What the compiler asks of a driver: the target, a device and a stream."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        # Compiled kernels are cached by device: one device per target.
        self._device = capability

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Resources of one compiled kernel; bytes, except registers (per thread)."""

    kernel: str
    registers: int
    stack: int
    shared: int


def usage(compiled: Any, name: str) -> Usage:
    """Read the resources that cuobjdump reports for a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True,
            check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    stack = numbers["STACK"] + numbers["LOCAL"]
    return Usage(kernel=name, registers=numbers["REG"], stack=stack, shared=compiled.metadata.shared)


@contextlib.contextmanager
def compile_only(capability: int) -> Iterator[list[Usage]]:
    """Launchers called inside compile their kernels for sm_<capability> and run none; gives the list of their
    resources."""
    found: list[Usage] = []
    seen = set()

    def compile_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **meta)
        if id(compiled) not in seen:
            seen.add(id(compiled))
            found.append(usage(compiled, kernel.fn.__name__))

    modules = [importlib.import_module(f"kernels.triton.{name}") for name in MODULES]
    previous = [module.launch for module in modules]
    architecture = config_table.architecture
    driver = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver(capability))
    config_table.architecture = lambda device: f"sm_{capability}"
    for module in modules:
        module.launch = compile_kernel
    try:
        yield found
    finally:
        for module, launch in zip(modules, previous, strict=True):
            module.launch = launch
        config_table.architecture = architecture
        triton.runtime.driver._active = driver
