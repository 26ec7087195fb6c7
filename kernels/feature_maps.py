"""Feature maps of linear attention, which queries and keys pass through."""

import torch
from torch import Tensor

from kernels.checks import check_shape, resolve_backend, triton_unfit


class _EluPlusOne(torch.autograd.Function):
    """Its derivative is min(y, 1) of its own value y: one tensor is kept, one pass goes back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.clamp(x, max=0).exp_().add_(torch.relu(x))

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return dy * y.clamp(max=1)


def elu_plus_one(x: Tensor, *, backend: str | None = None) -> Tensor:
    """elu(x) + 1, as exp(x) for x <= 0, so that very negative x keep their digits.

    `backend` is "torch", "triton" (met or refused with KernelError), or None: by the device.
    """
    check_shape("elu_plus_one", "x", x)
    if resolve_backend("elu_plus_one", backend, x, triton_unfit("chunked", {}, x)) == "torch":
        return _EluPlusOne.apply(x)
    from kernels.triton import feature_maps as fused

    # Rows as long as memory has them in one piece: all heads of a position.
    flat = x.flatten(0, 1).flatten(1) if x.ndim > 2 else x.reshape(-1, x.shape[-1])
    return fused.elu_plus_one(flat).view(x.shape)


def identity(x: Tensor) -> Tensor:
    """The feature map that changes nothing."""
    return x


FEATURE_MAPS = {"elu_plus_one": elu_plus_one, "identity": identity, "relu": torch.relu}
