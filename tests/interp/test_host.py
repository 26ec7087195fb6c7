"""Transfers that begin before they are waited for, and what a command on a GPU begins with."""

import ctypes

import torch

from interp import device_start
from interp.host import begin_to_host, to_host


def test_numbers_are_those_of_the_moment_the_transfer_began():
    whole, half = torch.arange(6.0).view(2, 3), torch.tensor(0.5, dtype=torch.float64)
    read = begin_to_host([whole, half])
    whole.zero_()
    found = read()
    assert [part.shape for part in found] == [(2, 3), ()]
    assert found[0].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] and found[1].item() == 0.5
    assert {part.dtype for part in found} == {torch.float64}
    assert to_host([]) == []


def test_the_context_is_that_of_the_device_asked_for(monkeypatch):
    class Driver:
        def __init__(self, name):
            called.append(name)

        def cuInit(self, flags):
            return self.failure

        def cuDeviceGet(self, handle, number):
            handle._obj.value = 100 + number
            return 0

        def cuDevicePrimaryCtxRetain(self, context, handle):
            called.append(handle.value)

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    for failure, device, expected in ((0, "cuda", [100]), (0, "cuda:3", [103]), (100, "cuda", [])):
        called, Driver.failure = [], failure
        device_start._begin_context(device)
        assert called == ["libcuda.so.1", *expected]


def test_a_machine_without_a_driver_is_left_to_say_so_later(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    device_start._begin_context("cuda")
    device_start._begin_context("cuda:x")
