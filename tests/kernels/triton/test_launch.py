"""Starting a kernel that was seen before: what is passed on, and what it takes to ask Triton again."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kernels.triton import launch


class Kernel:
    """Records what Triton is asked for and what is started without it."""

    arg_names = ("x_ptr", "y_ptr", "n", "scale", "BLOCK")

    def __init__(self) -> None:
        self.asked: list[tuple] = []
        self.started: list[tuple] = []

    def __getitem__(self, grid: tuple) -> object:
        def start(*args: object, **meta: object) -> SimpleNamespace:
            self.asked.append(args)
            return SimpleNamespace(run=self.run, function=11, packed_metadata=(4, 1, 0))

        return start

    def run(self, *args: object) -> None:
        self.started.append(args)


@pytest.fixture
def start(monkeypatch):
    """Start a kernel on device 0 in stream 7, with nothing seen before."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "_started", {})

    def call(kernel: Kernel, *args: object, block: int = 64) -> None:
        launch._start(kernel, (3, 2), args, {"BLOCK": block, "num_warps": 4}, 0)

    return call


def test_a_kernel_seen_before_is_started_with_addresses(start):
    kernel, x = Kernel(), torch.zeros(40)
    for _ in range(3):
        start(kernel, x, torch.nn.Parameter(x), 32, 0.5)
    assert len(kernel.asked) == 1 and len(kernel.started) == 2
    address = x.data_ptr()
    expected = (3, 2, 1, 7, 11, (4, 1, 0), None, None, None, address, address, 32, 0.5, 64)
    assert kernel.started == [expected] * 2
    start(kernel, x, None, 32, 0.5)
    assert len(kernel.asked) == 2


def test_a_new_length_asks_nothing_and_a_new_kind_of_one_does(start):
    kernel, x = Kernel(), torch.zeros(40)
    start(kernel, x, x, 33, 0.5)
    start(kernel, x, x, 35, 0.25)
    assert len(kernel.asked) == 1 and kernel.started[-1][-3:] == (35, 0.25, 64)
    changed = ((x, 1), (x, 32), (x, 2**31 + 1), (x.half(), 33), (x[1:], 33))
    others = [(x, y, n, 0.5) for y, n in changed]
    for number, args in enumerate(others):
        start(kernel, *args)
        assert len(kernel.asked) == number + 2
    start(kernel, x, x, 33, 0.5, block=128)
    assert len(kernel.asked) == len(others) + 2
    for args in others:
        start(kernel, *args)
    assert len(kernel.asked) == len(others) + 2


def test_the_look_ups_stay_small(start):
    kernel, x = Kernel(), torch.zeros(4)
    for n in range(5000):
        start(kernel, x, x, 2 * n + 3, 0.5)
    assert len(kernel.asked) == 1 and len(launch._started) <= 4097
