"""Norms, the MLP and the block that puts a mixer and an MLP on the residual stream."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from kernels.checks import working_dtype
from kernels.gated_silu import gated_silu, packed_gated_silu
from kernels.rms_norm import add_rms_norm, rms_norm
from models.config import LanguageModelConfig, MLPConfig
from models.lens import HookPoint, attached

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with a backward pass in few passes over memory."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Float[Tensor, "*batch d"], w: Float[Tensor, " d"], eps: float
    ) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch 1"]]:
        scale = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()
        return x * scale * w, scale

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        x, w, ctx.eps = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1], w)

    @staticmethod
    def backward(ctx, grad: Float[Tensor, "*batch d"], _: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale, w = ctx.saved_tensors
        if torch.is_grad_enabled():
            # For a second derivative the scale has to depend on x.
            scale = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        normalized = x * scale
        product = grad * normalized
        along = (product @ (w / w.shape[0])).unsqueeze(-1)
        grad_x = torch.addcmul(grad * w, normalized, along, value=-1).mul_(scale)
        return grad_x, product.flatten(0, -2).sum(0), None


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis, with a gain `w` and, as an option, a bias `b`.

    `hook_scale` [batch seq 1] is the divisor, `hook_normalized` [batch seq d_model] the quotient before gain
    and bias. The norm works in float32 when its input is of a lower precision; its output has the dtype of
    the gain (RMSNorm on a GPU under autocast: the dtype that the projections after it would cast it to).
    """

    def __init__(self, kind: str, width: int, eps: float, bias: bool = False):
        super().__init__()
        self.kind, self.eps = kind, eps
        self.w = nn.Parameter(torch.ones(width))
        self.b = nn.Parameter(torch.zeros(width)) if bias else None
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def after_adding(
        self, x: Float[Tensor, "*batch d_model"], delta: Float[Tensor, "*batch d_model"]
    ) -> tuple[Float[Tensor, "*batch d_model"], Float[Tensor, "*batch d_model"]]:
        """x + delta and its norm; on a GPU in one pass over memory."""
        watched = attached(self, self.hook_scale, self.hook_normalized)
        fused = x.is_cuda and self.kind == "rms" and not watched
        if fused and torch.promote_types(x.dtype, delta.dtype) == self.w.dtype:
            return add_rms_norm(x, delta, self.w, eps=self.eps, dtype=working_dtype(x))
        x = x + delta
        return x, self(x)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        if not attached(self.hook_scale, self.hook_normalized) and x.dtype == self.w.dtype:
            if self.kind == "layer":
                return F.layer_norm(x, self.w.shape, self.w, self.b, self.eps)
            if x.is_cuda:
                return rms_norm(x, self.w, eps=self.eps, dtype=working_dtype(x))
            # On CPU the backward pass of torch's own takes twice as long.
            if x.device.type == "cpu" and torch.is_grad_enabled() and x.dtype.itemsize >= 4:
                return _RMSNorm.apply(x, self.w, self.eps)[0]
            return F.rms_norm(x, self.w.shape, self.w, self.eps)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        scale = self.hook_scale((x.square().mean(-1, keepdim=True) + self.eps).sqrt())
        y = self.hook_normalized(x / scale) * self.w
        return (y if self.b is None else y + self.b).to(self.w.dtype)


class NoNorm(nn.Identity):
    """The identity in a norm's place, without hook points."""

    def after_adding(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta, twice."""
        x = x + delta
        # Called: PyTorch's own hooks see it.
        return x, self(x)


def make_norm(config: LanguageModelConfig) -> nn.Module:
    """The norm that a model's configuration names."""
    if config.norm == "none":
        return NoNorm()
    return Norm(config.norm, config.d_model, config.norm_eps, config.norm_bias)


class MLP(nn.Module):
    """`act(x W_in + b_in) W_out + b_out`; gated: `act(x W_gate + b_gate) * (x W_in + b_in)` before W_out.

    `hook_pre` is what the activation is applied to, `hook_pre_linear` the other factor of a gated MLP,
    `hook_post` what W_out multiplies; each [batch seq d_mlp].
    """

    def __init__(self, config: MLPConfig, d_model: int):
        super().__init__()
        self.act = ACTIVATIONS[config.act]

        def bias(width: int) -> nn.Parameter | None:
            return nn.Parameter(torch.zeros(width)) if config.bias else None

        self.W_in = nn.Parameter(torch.empty(d_model, config.d_mlp))
        self.b_in = bias(config.d_mlp)
        self.W_gate = nn.Parameter(torch.empty(d_model, config.d_mlp)) if config.gated else None
        self.b_gate = bias(config.d_mlp) if config.gated else None
        self.W_out = nn.Parameter(torch.empty(config.d_mlp, d_model))
        self.b_out = bias(d_model)
        self.hook_pre = HookPoint()
        if config.gated:
            self.hook_pre_linear = HookPoint()
        self.hook_post = HookPoint()

    def reset_parameters(self, *, std: float, out_std: float, generator: torch.Generator | None) -> None:
        """Normal weights, zero biases."""
        for weight, spread in ((self.W_in, std), (self.W_gate, std), (self.W_out, out_std)):
            if weight is not None:
                nn.init.normal_(weight, std=spread, generator=generator)
        for bias in (self.b_in, self.b_gate, self.b_out):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq d_model"]:
        if self._projects_once(x):
            post = packed_gated_silu(F.linear(x, *self._gate_and_in()))
            return F.linear(self.hook_post(post), self.W_out.T, self.b_out)
        inner = F.linear(x, self.W_in.T, self.b_in)
        if self.W_gate is None:
            post = self.act(self.hook_pre(inner))
        else:
            gate = self.hook_pre(F.linear(x, self.W_gate.T, self.b_gate))
            inner = self.hook_pre_linear(inner)
            post = gated_silu(gate, inner) if self.act is F.silu else self.act(gate) * inner
        return F.linear(self.hook_post(post), self.W_out.T, self.b_out)

    def _projects_once(self, x: Tensor) -> bool:
        """Whether gate and inner values are one projection: in training on a GPU, where nothing looks at
        either, so that the gradient of x is one product too."""
        fits = x.is_cuda and self.W_gate is not None and self.act is F.silu and self.W_in.dtype.itemsize <= 4
        return fits and torch.is_grad_enabled() and not attached(self.hook_pre, self.hook_pre_linear)

    def _gate_and_in(self) -> tuple[Float[Tensor, "both d_model"], Float[Tensor, " both"] | None]:
        """Weight and bias of that projection, gates first, in the dtype that it works in."""
        dtype = working_dtype(self.W_in)
        weight = torch.cat((self.W_gate.to(dtype), self.W_in.to(dtype)), 1).T
        if self.b_in is None:
            return weight, None
        return weight, torch.cat((self.b_gate.to(dtype), self.b_in.to(dtype)))


class Block(nn.Module):
    """A mixer, registered as `attn` whatever its kind, and perhaps an MLP, each behind its own norm.

    Serial: the MLP reads the residual stream after the mixer wrote to it (`hook_resid_mid`). Parallel
    (`parallel_residual`): both read the same stream. Without an MLP there is no `ln2`, `hook_resid_mid` or
    `hook_mlp_out`.
    """

    def __init__(self, config: LanguageModelConfig, mixer: nn.Module):
        super().__init__()
        self.parallel = config.parallel_residual
        self.ln1 = make_norm(config)
        self.attn = mixer
        self.hook_resid_pre = HookPoint()
        self.hook_attn_out = HookPoint()
        self.hook_resid_post = HookPoint()
        self.mlp = None
        if config.mlp is not None:
            self.ln2 = make_norm(config)
            self.mlp = MLP(config.mlp, config.d_model)
            self.hook_mlp_out = HookPoint()
            if not self.parallel:
                self.hook_resid_mid = HookPoint()

    def forward(
        self,
        resid: Float[Tensor, "batch seq d_model"],
        mix: Callable[[nn.Module, Float[Tensor, "batch seq d_model"]], Float[Tensor, "batch seq d_model"]],
        delta: Float[Tensor, "batch seq d_model"] | None = None,
        *,
        defer: bool = False,
    ) -> Any:
        """The residual stream after this block.

        Args:
            resid: The residual stream before it.
            mix: Called with the mixer and its input; returns the mixer's output (the caller keeps form and
            state).
            delta: What is still to be added to `resid`.
            defer: Leave the last addition to whoever reads the result: a norm that follows adds and
            normalises in one pass.

        Returns:
            The stream [batch seq d_model]; with `defer`, (stream, what is still to be added or None). Where a
            hook sees a sum, it is computed.
        """
        resid, delta = self._evaluate(resid, delta, mix)
        return (resid, delta) if defer else added(resid, delta)

    def _evaluate(self, resid: Tensor, delta: Tensor | None, mix: Callable) -> tuple[Tensor, Tensor | None]:
        if attached(self.hook_resid_pre):
            resid, delta = self.hook_resid_pre(added(resid, delta)), None
        resid, normed = normed_sum(self.ln1, resid, delta)
        delta = self.hook_attn_out(mix(self.attn, normed))
        if self.mlp is not None:
            if self.parallel:
                normed = self.ln2(resid)
                resid = resid + delta
            else:
                if attached(self.hook_resid_mid):
                    resid, delta = self.hook_resid_mid(resid + delta), None
                resid, normed = normed_sum(self.ln2, resid, delta)
            delta = self.hook_mlp_out(self.mlp(normed))
        if attached(self.hook_resid_post):
            return self.hook_resid_post(resid + delta), None
        return resid, delta


def added(resid: Tensor, delta: Tensor | None) -> Tensor:
    """Their sum; resid where there is nothing to add."""
    return resid if delta is None else resid + delta


def normed_sum(norm: Norm | NoNorm, resid: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """The residual stream with what is still to be added, and its norm."""
    return (resid, norm(resid)) if delta is None else norm.after_adding(resid, delta)
