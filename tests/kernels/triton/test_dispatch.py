"""What a CUDA tensor meets before a kernel starts: no GPU is needed to refuse it."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from kernels import KernelError, checks
from kernels import causal_conv as conv
from kernels import gated_linear_attention as linear
from kernels import selective_scan as scan
from kernels import softmax_attention as softmax
from kernels.triton import config_table, launch


def on_cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without data that says it is on a GPU."""
    with FakeTensorMode():
        return torch.empty(*shape, device="cuda", dtype=dtype)


def test_a_gpu_without_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    launch._has_bfloat16.cache_clear()
    try:
        with pytest.raises(KernelError, match="scan: Tesla T4 has no bfloat16, accepted are float32"):
            launch.check_dtype("scan", on_cuda(2, 3))
        launch.check_dtype("scan", on_cuda(2, 3, dtype=torch.float16))
    finally:
        launch._has_bfloat16.cache_clear()


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), "sm_80"), ((9, 0), "sm_90"), ((10, 0), "sm_100")]
)
def test_an_architecture_with_a_table(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config_table.architecture.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert config_table.architecture(torch.device("cuda", 0)) == expected
    finally:
        config_table.architecture.cache_clear()


def test_an_architecture_without_a_table_is_said_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 1))
    config_table.architecture.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no kernel configurations for sm_121; those of sm_80 are used"):
            assert config_table.architecture(torch.device("cuda", 0)) == "sm_80"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert config_table.architecture(torch.device("cuda", 0)) == "sm_80"
    finally:
        config_table.architecture.cache_clear()


def test_every_part_has_an_entry_for_every_width_and_dtype():
    parts = {part for part, _, _ in config_table._SM_80}
    for table in config_table.TABLES:
        for part in parts:
            for width in (16, 32, 64, 128, 256):
                for size in (2, 4):
                    found = config_table._look_up(part, width, size, table)
                    assert found.block_m >= 16 and found.block_n >= 16, (table, part, width, size)


def test_tiles_of_the_widest_head_are_those_that_were_run():
    """64 rows at d_head 256 made matrix products read shared memory out of bounds on a GPU."""
    for table in config_table.TABLES:
        assert config_table._look_up("linear_output", 256, 2, table).block_m == 32


def test_without_triton_a_cuda_tensor_runs_in_torch_and_says_so(monkeypatch):
    monkeypatch.setattr(checks, "_TRITON_FOUND", False)
    checks._say_missing.cache_clear()
    with pytest.warns(UserWarning, match="triton is not installed: CUDA tensors run in the slower torch"):
        assert checks.resolve_backend("selective_scan", None, on_cuda(2, 3)) == "torch"
    with pytest.raises(KernelError, match="needs the package triton, which is not installed"):
        checks.resolve_backend("selective_scan", "triton", on_cuda(2, 3))


@pytest.mark.parametrize(
    ("unfit", "widths"),
    [("d_head 257", {"d_head": 257}), ("d_state 300", {"d_head": 64, "d_state": 300}), (None, {"d_v": 256})],
)
def test_widths_above_the_kernels(unfit, widths):
    x = on_cuda(1, 4, 2, 8)
    assert checks.triton_unfit("chunked", widths, x) == unfit
    if unfit is None:
        return
    # By the tensor's device it runs in torch; asked for by name it is refused.
    assert checks.resolve_backend("softmax_attention", None, x, unfit) == "torch"
    with pytest.raises(KernelError, match=f"'triton' does not take {unfit}, accepted is backend 'torch'"):
        checks.resolve_backend("softmax_attention", "triton", x, unfit)


def calls(q: torch.Tensor, k: torch.Tensor) -> dict:
    u, rates = q[:, :, 0], torch.zeros(q.shape[3], 4)
    return {
        "softmax_attention": lambda: softmax.softmax_attention(q, k, k),
        "gated_linear_attention": lambda: linear.gated_linear_attention(q, k, k),
        "selective_scan": lambda: scan.selective_scan(u, k[:, :, 0], rates, u[..., :4], u[..., :4]),
        "causal_conv": lambda: conv.causal_conv(u, k[0, :, 0].T[:, :4]),
    }


@pytest.mark.parametrize("operator", list(calls(torch.zeros(1, 4, 1, 4), torch.zeros(1, 4, 1, 4))))
def test_integers_and_two_devices_are_named(operator):
    x = torch.zeros(1, 4, 2, 4)
    with pytest.raises(KernelError, match=f"{operator}: .* has dtype torch.int64, accepted are floating"):
        calls(x.long(), x.long())[operator]()
    with pytest.raises(KernelError, match=f"{operator}: .* is on (meta|cpu), but .* is on (meta|cpu)"):
        calls(x, x.to("meta"))[operator]()


def test_heads_that_do_not_divide_are_named():
    x, y = torch.zeros(1, 4, 6, 8), torch.zeros(1, 4, 4, 8)
    with pytest.raises(KernelError, match="softmax_attention: k has 4 heads, accepted are divisors of 6"):
        softmax.softmax_attention(x, y, y)
    with pytest.raises(KernelError, match="attention: q has 4 heads, accepted are divisors of 6"):
        linear.gated_linear_attention(y, y, x)
