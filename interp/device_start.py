"""What a command on a GPU waits for before its first kernel, begun while the main thread imports."""

import contextlib
import ctypes
import os
import threading


def begin_device(device: str) -> None:
    """Begin the device's context and Triton's hash of its own files, in threads of their own.

    What fails here fails again where it is used.
    """
    for begin in (_begin_context, _begin_libraries, _begin_triton):
        threading.Thread(target=begin, args=(device,), daemon=True).start()


def _begin_context(device: str) -> None:
    """The driver's own context of a device ("cuda", "cuda:N"), which torch then finds: without torch, whose
    import takes as long.
    """
    # As torch would set it: the driver reads it once.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), _number(device)) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)


def _number(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _begin_libraries(device: str) -> None:
    """cuBLAS."""
    with contextlib.suppress(Exception):
        import torch

        one = torch.ones(1, 1, device=device)
        one @ one


def _begin_triton(device: str) -> None:
    """The hash by which Triton finds the kernels that it has compiled before; it needs no torch."""
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()
