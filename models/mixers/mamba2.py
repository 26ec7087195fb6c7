"""Mamba-2 (SSD) as a mixer, in the parameter layout of Hugging Face's Mamba2Mixer.

    [z xBC dt] = in_proj(input)      [x B C] = SiLU(conv1d(xBC))      dt = softplus(dt + dt_bias)
    y = scan(x, dt, A, B, C) + D x   output = out_proj(RMSNorm(y * SiLU(z)))

Glossary (Dao and Gu 2024, arXiv:2405.21060): A = -exp(A_log) one decay rate per head, B what is written, C
what is read (each shared by the heads of a group), D the skip, dt step sizes, z the gate. In the hooks q = C,
k = B, v = x.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import gated_linear_attention
from kernels.checks import working_dtype
from kernels.gated_linear_attention import LinearState
from kernels.rms_norm import rms_norm
from kernels.ssd_block import ssd_block
from models.config import Mamba2Config, RopeConfig
from models.errors import ConfigError
from models.form import Form
from models.lens import attached
from models.mixers.base import ALL_FORMS, PARALLEL_ONLY, RECURRENT_ONLY, OVFactors
from models.mixers.mamba import Mamba
from models.mixers.mamba2_reading import Mamba2Parts, mamba2_reading
from models.mixers.mamba_init import dt_bias, slow_A_log
from models.mixers.reading import Reading


@dataclass(frozen=True, kw_only=True)
class Mamba2State:
    """The scan's state, the convolution's last inputs (oldest first) and the number of positions seen."""

    ssm: Float[Tensor, "batch head d_head d_state"]
    conv: Float[Tensor, "batch width_1 channel"]
    length: int


class _Scan(NamedTuple):
    """What the scan is given."""

    x: Float[Tensor, "batch seq head d_head"]
    dt: Float[Tensor, "batch seq head"]
    log_decay: Float[Tensor, "batch seq head"]
    B: Float[Tensor, "batch seq group d_state"]
    C: Float[Tensor, "batch seq group d_state"]

    @property
    def options(self) -> dict:
        """Options of the linear-attention kernels that make them Mamba-2's scan."""
        return {"log_decay": self.log_decay, "k_weight": self.dt}


class GatedNorm(nn.Module):
    """RMSNorm of gated values, over each of `n_groups` equal groups of channels, with a gain."""

    def __init__(self, width: int, n_groups: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.n_groups, self.eps = n_groups, eps

    def forward(
        self, y: Float[Tensor, "*batch channel"], gate: Float[Tensor, "*batch channel"] | None = None
    ) -> Float[Tensor, "*batch channel"]:
        """The norm of y, or of y SiLU(gate)."""
        if self.n_groups == 1 and y.is_cuda:
            return rms_norm(y, self.weight, eps=self.eps, gate=gate, dtype=working_dtype(y))
        if gate is not None:
            y = y * F.silu(gate)
        if self.n_groups == 1:
            return F.rms_norm(y, self.weight.shape, self.weight, self.eps)
        groups = y.unflatten(-1, (self.n_groups, -1))
        return F.rms_norm(groups, groups.shape[-1:], None, self.eps).flatten(-2) * self.weight

    def factor(self, y: Float[Tensor, "*batch channel"]) -> Float[Tensor, "*batch channel"]:
        """What `forward` multiplies y with: gain over root mean square, to be frozen by a reading."""
        groups = y.unflatten(-1, (self.n_groups, -1))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return scale.expand_as(groups).flatten(-2) * self.weight


class Mamba2(Mamba):
    """The Mamba-2 block's mixer.

    `hook_write` (dt x B) and `hook_state`, each [batch head d_head d_state], fire once per position in
    RECURRENT; `hook.ctx["position"]` tells which. `hook_decay` is the log decay.
    """

    kind = "mamba2"
    state_type = Mamba2State

    def __init__(
        self, config: Mamba2Config, d_model: int, *, n_ctx: int | None = None, rope: RopeConfig | None = None
    ):
        config = config.resolved(d_model)
        if config.n_heads % config.n_groups:
            raise ConfigError(
                f"n_groups is {config.n_groups}; accepted: a divisor of n_heads = {config.n_heads}"
            )
        shared = config.n_groups * config.d_state
        conv_widths = (config.d_inner, shared, shared)
        in_widths = (config.d_inner, sum(conv_widths), config.n_heads)
        super().__init__(
            config,
            d_model,
            n_heads=config.n_heads,
            d_head=config.d_head,
            d_projected=sum(in_widths),
            d_convolved=sum(conv_widths),
            rope=rope,
        )
        self.n_groups = config.n_groups
        self._conv_widths, self._in_widths = conv_widths, in_widths
        self.dt_bias = nn.Parameter(torch.empty(self.n_heads))
        self.A_log = nn.Parameter(torch.empty(self.n_heads))
        self.D = nn.Parameter(torch.ones(self.n_heads))
        self.norm = GatedNorm(self.d_inner, self.n_groups, config.norm_eps) if config.gated_norm else None
        names = ("conv", "q", "k", "v", "dt", "decay", "gate", "z", "result")
        self._add_hooks(dict.fromkeys((f"hook_{name}" for name in names), ALL_FORMS))
        self._add_hooks({"hook_pattern": PARALLEL_ONLY})
        self._add_hooks(dict.fromkeys(("hook_write", "hook_state"), RECURRENT_ONLY))

    def evaluate(
        self, x: Float[Tensor, "batch seq d_model"], form: Form, state: Mamba2State | None
    ) -> tuple[Float[Tensor, "batch seq d_model"], Mamba2State]:
        """Output and state; see `Mixer.evaluate`."""
        packed = self.in_proj(x)
        start = 0 if state is None else state.length
        if state is None and form is Form.CHUNKED and self._is_one_operator(packed):
            y, ssm, conv = self._block(packed)
            return self._output(y), Mamba2State(ssm=ssm, conv=conv, length=x.shape[1])
        z, xBC, dt = packed.split(self._in_widths, -1)
        xBC, conv = self._convolve(xBC, None if state is None else state.conv, form)
        scan = self._scan_inputs(self.hook_conv(xBC), dt, hooked=True)
        before = None if state is None else state.ssm
        if form is Form.CHUNKED:
            y, ssm = self._chunked(scan, before, self.D)
        else:
            if form is Form.RECURRENT:
                y, ssm = self._recurrent(scan, before, start)
            else:
                y, ssm = self._parallel(scan, before), self._chunked(scan, before)[1]
            y = y + self.D[:, None] * scan.x
        y = self._gated(self.hook_z(y), z)
        return self._output(y), Mamba2State(ssm=ssm, conv=conv, length=start + x.shape[1])

    def _gated(self, y: Float[Tensor, "batch seq head d_head"], z: Tensor) -> Tensor:
        y = y.flatten(2)
        if y.is_cuda and self.norm is not None and not attached(self.hook_gate):
            # Nothing looks at the gate: it is multiplied inside the norm.
            return self.norm(y, z)
        return self._normed(y * self.hook_gate(F.silu(z)))

    def output_from_z(self, x: Tensor, z: Tensor) -> Tensor:
        """See `Mixer.output_from_z`: x gives the gate."""
        gate = self.in_proj(x).split(self._in_widths, -1)[0]
        return self._output(self._gated(z, gate.repeat(len(z) // len(x), 1, 1)))

    def _is_one_operator(self, packed: Tensor) -> bool:
        """Whether what lies between the projections is one operator: in training on a GPU, where nothing
        looks at what is inside."""
        points = ("conv", "q", "k", "v", "dt", "decay", "gate", "z")
        return (
            packed.is_cuda
            and torch.is_grad_enabled()
            and self.norm is not None
            and self.n_groups == 1
            and self.config.dt_limits is None
            and not attached(self.norm, *(getattr(self, f"hook_{name}") for name in points))
        )

    def _block(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What lies between the projections, of a sequence from its start: output, states of scan and
        convolution."""
        return ssd_block(
            packed,
            self.conv1d.weight[:, 0],
            self.conv1d.bias,
            self.dt_bias,
            self.A_log,
            self.D,
            self.norm.weight,
            n_groups=self.n_groups,
            eps=self.norm.eps,
            dtype=working_dtype(packed),
        )

    def _scan_inputs(self, xBC: Tensor, dt: Tensor, *, hooked: bool) -> _Scan:
        x, B, C = xBC.split(self._conv_widths, -1)
        x = x.unflatten(-1, (self.n_heads, self.d_head))
        B, C = (part.unflatten(-1, (self.n_groups, self.d_state)) for part in (B, C))
        dt = self._steps(dt, self.dt_bias)
        if self.config.dt_limits is not None:
            dt = dt.clamp(*self.config.dt_limits)
        if hooked:
            C, B, x, dt = self.hook_q(C), self.hook_k(B), self.hook_v(x), self.hook_dt(dt)
        log_decay = -torch.exp(self.A_log) * dt
        return _Scan(x, dt, self.hook_decay(log_decay) if hooked else log_decay, B, C)

    def _chunked(
        self, scan: _Scan, state: Tensor | None, skip: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y, after = gated_linear_attention.gated_linear_attention(
            scan.C, scan.B, scan.x, state=_as_linear(state), skip=skip, **scan.options
        )
        return y, after.s.transpose(-1, -2)

    def _parallel(self, scan: _Scan, state: Tensor | None) -> Tensor:
        pattern = self.hook_pattern(gated_linear_attention.pattern(scan.C, scan.B, **scan.options))
        y = torch.einsum("bhij,bjhd->bihd", pattern, scan.x.to(pattern.dtype)).to(scan.x.dtype)
        if state is None:
            return y
        return y + self._chunked(scan._replace(x=torch.zeros_like(scan.x)), state)[0]

    def _recurrent(self, scan: _Scan, state: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """Token by token; what the two points of the recurrence return is carried on."""
        hooked = attached(self.hook_write, self.hook_state)
        outputs = []
        for t in range(scan.x.shape[1]):
            here = _Scan(*(part[:, t] for part in scan))
            if hooked:
                self.hook_write.ctx["position"] = self.hook_state.ctx["position"] = start + t
                y, state = self._hooked_step(here, state)
            else:
                y, after = gated_linear_attention.step(
                    here.C, here.B, here.x, state=_as_linear(state), **here.options
                )
                state = after.s.transpose(-1, -2)
            outputs.append(y)
        return torch.stack(outputs, 1), state

    def _hooked_step(self, here: _Scan, state: Tensor | None) -> tuple[Tensor, Tensor]:
        repeat = self.n_heads // self.n_groups
        B, C = here.B.repeat_interleave(repeat, 1), here.C.repeat_interleave(repeat, 1)
        state_ = self.hook_write((here.dt[..., None] * here.x)[..., None] * B[:, :, None])
        if state is not None:
            state_ = state_ + torch.exp(here.log_decay)[..., None, None] * state
        state_ = self.hook_state(state_)
        y = torch.einsum("bhdn,bhn->bhd", state_, C.to(state_.dtype))
        return y.to(here.x.dtype), state_

    def _normed(self, y: Float[Tensor, "batch seq d_inner"]) -> Float[Tensor, "batch seq d_inner"]:
        return y if self.norm is None else self.norm(y)

    def implied_attention(
        self, x: Float[Tensor, "batch seq d_model"]
    ) -> Float[Tensor, "batch head dest=seq src=seq"]:
        """The scan's A per head, signed, without D, gate and norm."""
        scan = self._parts(x).scan
        return gated_linear_attention.pattern(scan.C, scan.B, **scan.options)

    def _parts(self, x: Float[Tensor, "batch seq d_model"]) -> Mamba2Parts:
        """Everything a reading needs, of a whole sequence and without hooks."""
        z, xBC, dt = self.in_proj(x).split(self._in_widths, -1)
        pre = self._pre(xBC)
        scan = self._scan_inputs(F.silu(pre), dt, hooked=False)
        gate = F.silu(z)
        if self.norm is not None:
            y = self._chunked(scan, None)[0] + self.D[:, None] * scan.x
            gate = gate * self.norm.factor(y.flatten(2) * gate)
        channels = slice(0, self.d_inner)
        return Mamba2Parts(mixer=self, inner=xBC[..., channels], pre=pre[..., channels], scan=scan, gate=gate)

    def _reading(self, parts: Mamba2Parts, reading: str, units: str) -> Reading:
        return mamba2_reading(parts, reading)

    def init_state(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Mamba2State:
        """Zeros; the scan's state is kept in float32 or better."""
        own = self._own(batch, device, dtype)
        conv = torch.zeros(batch, self.config.d_conv - 1, sum(self._conv_widths), **own)
        own["dtype"] = torch.promote_types(own["dtype"], torch.float32)
        ssm = torch.zeros(batch, self.n_heads, self.d_head, self.d_state, **own)
        return Mamba2State(ssm=ssm, conv=conv, length=0)

    def state_size(self) -> int:
        """Numbers in the state of one sequence, whatever its length."""
        return self.d_inner * self.d_state + (self.config.d_conv - 1) * sum(self._conv_widths)

    @torch.no_grad()
    def reset_parameters(self, *, std: float, out_std: float, generator: torch.Generator | None) -> None:
        """Mamba-2's own scheme; `std` is not used: the input projection is uniform by fan-in.

        "standard": A uniform in 1 .. 16, dt log-uniform in dt_min .. dt_max. "slow": dt = 0.1 and time
        constants of 8 .. 512 tokens, log-spaced over the heads. D = 1, norm gain 1.
        """
        config = self.config
        self._reset_block(out_std, generator)
        self.dt_bias.copy_(
            dt_bias(
                self.n_heads,
                init=config.init,
                dt_min=config.dt_min,
                dt_max=config.dt_max,
                generator=generator,
            )
        )
        if config.init == "slow":
            self.A_log.copy_(slow_A_log(self.n_heads))
        else:
            self.A_log.copy_(torch.empty(self.n_heads).uniform_(1, 16, generator=generator).log())
        if self.norm is not None:
            self.norm.weight.fill_(1)

    def _factors(self, parts: Mamba2Parts) -> OVFactors:
        """By head: in_proj, sum of taps, mean sigmoid(pre), mean gate and norm, out_proj."""
        gain = self._tap_gain(parts.pre)
        mean_gate = parts.gate.mean((0, 1)).view(self.n_heads, self.d_head, 1)
        return OVFactors(
            self.W_V * gain.view(self.n_heads, 1, self.d_head),
            mean_gate * self.W_O,
            "mean gate and norm, mean sigmoid(pre), sum of the convolution's taps",
        )

    # Views of the stored parameters (before the convolution); W_Q and W_K repeat a group's for each of its
    # heads.

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_state"]:
        """C's projection by head."""
        return self._shared_weight(2)

    @property
    def W_K(self) -> Float[Tensor, "head d_model d_state"]:
        """B's projection by head."""
        return self._shared_weight(1)

    @property
    def W_V(self) -> Float[Tensor, "head d_model d_head"]:
        """x's projection by head."""
        x = self.in_proj.weight.split(self._in_widths)[1][: self.d_inner]
        return x.view(self.n_heads, self.d_head, self.d_model).transpose(1, 2)

    def _shared_weight(self, part: int) -> Tensor:
        rows = self.in_proj.weight.split(self._in_widths)[1].split(self._conv_widths)[part]
        groups = rows.view(self.n_groups, self.d_state, self.d_model).transpose(1, 2)
        return groups.repeat_interleave(self.n_heads // self.n_groups, 0)


def _as_linear(state: Tensor | None) -> LinearState | None:
    return None if state is None else LinearState(s=state.transpose(-1, -2))
