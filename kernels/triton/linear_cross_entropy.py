"""Cross entropy of a linear map's logits on a GPU: the logits are written once, read once, and overwritten
in the same pass by the loss's gradient in them, which two matrix products turn into those of the inputs.

Products are cuBLAS's, in the dtype of x with sums in float32, which gradients keep to the end.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.checks import without_autocast
from kernels.triton.cross_entropy import losses_of_rows
from kernels.triton.launch import check_dtype, rows
from kernels.triton.ops import differentiable, differentiable_once, operators, register
from kernels.triton.scaled_rows import scaled_rows

OPERATOR = "linear_cross_entropy"
# Rows of logits begin at multiples of this many numbers: odd vocabularies are read and multiplied as fast.
ALIGNMENT = 16


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """Loss of each row, float32; logits, and what is saved of them, have the dtype of x, whatever the
    weight's. Arguments checked by the caller."""
    check_dtype(OPERATOR, x)
    asks = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    return operators.linear_cross_entropy(x, weight, bias, target, asks)[0]


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, asks: bool
) -> tuple[Tensor, Tensor]:
    """Losses, and where a gradient will be asked for d loss / d logits in aligned rows, else nothing."""
    aligned = _empty_rows(x, weight)
    logits, weight = aligned[:, : weight.shape[0]], weight.to(x.dtype)
    if bias is None:
        torch.mm(x, weight.T, out=logits)
    else:
        torch.addmm(bias.to(x.dtype), x, weight.T, out=logits)
    loss, _ = losses_of_rows(logits, target, overwrite=asks, n_readable=aligned.shape[1])
    return loss, aligned if asks else x.new_empty(0)


def _empty_rows(x: Tensor, weight: Tensor) -> Tensor:
    """[row class], with more classes than there are where rows would else not be aligned."""
    return x.new_empty(x.shape[0], -(-weight.shape[0] // ALIGNMENT) * ALIGNMENT)


def _backward(
    dloss: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, pull: Tensor,
    for_x: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (x, weight, bias), those not asked for empty; pull: d loss / d logits, aligned."""
    pull = pull[:, : weight.shape[0]]
    dx, dweight, dbias = (t.new_empty(0) for t in (x, weight, x if bias is None else bias))
    if for_x:
        dx = scaled_rows(_product(pull, weight.to(x.dtype)), dloss, x.dtype)
    # Below 6e-5 float16 has no digits to spare, and a mean over rows asks for such cotangents.
    scale = _scale(dloss) if x.dtype == torch.float16 else None
    if scale is not None:
        dloss = dloss / scale
    if for_weight:
        dweight = _pulled(pull, scaled_rows(rows(x), dloss, x.dtype), scale, weight)
    if for_bias:
        dbias = _pulled(pull, dloss[:, None].to(x.dtype), scale, bias).view(bias.shape)
    return dx, dweight, dbias


def _scale(dloss: Tensor) -> Tensor:
    """A power of two just above the largest magnitude, found on the device; dividing by it rounds nothing."""
    largest = torch.cat((dloss.abs(), dloss.new_zeros(1))).amax()
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)


def _pulled(pull: Tensor, x: Tensor, scale: Tensor | None, like: Tensor) -> Tensor:
    """pull^T x times the scale, in the dtype of `like`."""
    product = _product(pull.T, x)
    return (product if scale is None else product.mul_(scale)).to(like.dtype)


@without_autocast
def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32."""
    if a.dtype == torch.float32:
        return a @ b
    # Off a GPU, in the interpreter, there is no product that widens.
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, asks: bool
) -> tuple[Tensor, Tensor]:
    loss = x.new_empty(x.shape[0], dtype=torch.float32)
    return loss, _empty_rows(x, weight) if asks else x.new_empty(0)


def _fake_backward(
    dloss: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, pull: Tensor,
    for_x: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = (x, for_x), (weight, for_weight), (x if bias is None else bias, for_bias)
    return tuple(t.new_empty(t.shape if asks else 0) for t, asks in inputs)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], output[1])


def _gradient(ctx: Any, dloss: Tensor | None, unused: Any) -> tuple:
    if dloss is None:
        return None, None, None, None, None
    x, weight, bias, pull = ctx.saved_tensors
    asks = ctx.needs_input_grad[:3]
    found = operators.linear_cross_entropy_backward(dloss, x, weight, bias, pull, *asks)
    return *(gradient if asked else None for gradient, asked in zip(found, asks, strict=True)), None, None


register(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, bool asks) "
    "-> (Tensor, Tensor)",
    _forward,
    _fake,
)
register(
    "linear_cross_entropy_backward(Tensor dloss, Tensor x, Tensor weight, Tensor? bias, Tensor pull, "
    "bool for_x, bool for_weight, bool for_bias) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
differentiable("linear_cross_entropy", _setup, _gradient)
differentiable_once("linear_cross_entropy_backward")
