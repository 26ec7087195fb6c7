"""Mamba-1 as a mixer, in the parameter layout of Hugging Face's MambaMixer.

    [x z] = in_proj(input)           u = SiLU(conv1d(x))
    [dt_low B C] = x_proj(u)         dt = softplus(dt_proj(dt_low))
    y = (scan(u, dt, A, B, C) + D u) * SiLU(z)           output = out_proj(y)

Glossary (Gu and Dao 2023, arXiv:2312.00752): A = -exp(A_log) decay rates [d_inner d_state], B what is
written, C what is read, D the skip, dt step sizes, z the gate. In the hooks q = C, k = B, v = u; every
channel is a head of width 1.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import selective_scan
from models.config import Mamba1Config, RopeConfig
from models.form import Form
from models.lens import attached
from models.mixers.base import ALL_FORMS, PARALLEL_ONLY, RECURRENT_ONLY, OVFactors
from models.mixers.mamba import Mamba
from models.mixers.mamba1_reading import Mamba1Parts, mamba1_reading
from models.mixers.mamba_init import dt_bias, fan_in_uniform, slow_A_log
from models.mixers.reading import BLOCK_BYTES, Reading


@dataclass(frozen=True, kw_only=True)
class Mamba1State:
    """The scan's state, the convolution's last inputs (oldest first) and the number of positions seen."""

    ssm: Float[Tensor, "batch d_inner d_state"]
    conv: Float[Tensor, "batch width_1 d_inner"]
    length: int


class _Scan(NamedTuple):
    """What the scan is given."""

    u: Float[Tensor, "batch seq d_inner"]
    dt: Float[Tensor, "batch seq d_inner"]
    B: Float[Tensor, "batch seq d_state"]
    C: Float[Tensor, "batch seq d_state"]


class Mamba1(Mamba):
    """The Mamba-1 block's mixer.

    With `constant_bcdt` B, C and dt are parameters instead of functions of the input: the scan is then a
    fixed convolution per channel (S4D), the content-independent control whose implied attention is Toeplitz.

    `hook_decay` (log decay) and `hook_write` (dt u B), each [batch d_inner d_state], fire once per position
    in RECURRENT, as does `hook_state`; `hook.ctx["position"]` tells which.
    """

    kind = "mamba1"
    state_type = Mamba1State
    unit_names = ("layer", "state", "cluster:K")

    def __init__(
        self, config: Mamba1Config, d_model: int, *, n_ctx: int | None = None, rope: RopeConfig | None = None
    ):
        config = config.resolved(d_model)
        channels = config.d_inner
        super().__init__(
            config,
            d_model,
            n_heads=channels,
            d_head=1,
            d_projected=2 * channels,
            d_convolved=channels,
            rope=rope,
        )
        if config.constant_bcdt:
            self.B = nn.Parameter(torch.empty(config.d_state))
            self.C = nn.Parameter(torch.empty(config.d_state))
            self.dt_bias = nn.Parameter(torch.empty(channels))
        else:
            self.x_proj = nn.Linear(channels, config.dt_rank + 2 * config.d_state, bias=False)
            self.dt_proj = nn.Linear(config.dt_rank, channels)
        self.A_log = nn.Parameter(torch.empty(channels, config.d_state))
        self.D = nn.Parameter(torch.ones(channels))
        names = ("hook_conv", "hook_q", "hook_k", "hook_v", "hook_dt", "hook_gate", "hook_z", "hook_result")
        self._add_hooks(dict.fromkeys(names, ALL_FORMS))
        self._add_hooks({"hook_pattern": PARALLEL_ONLY})
        self._add_hooks(dict.fromkeys(("hook_decay", "hook_write", "hook_state"), RECURRENT_ONLY))

    def evaluate(
        self, x: Float[Tensor, "batch seq d_model"], form: Form, state: Mamba1State | None
    ) -> tuple[Float[Tensor, "batch seq d_model"], Mamba1State]:
        """Output and state; see `Mixer.evaluate`."""
        inner, z = self.in_proj(x).chunk(2, -1)
        u, conv = self._convolve(inner, None if state is None else state.conv, form)
        scan = self._hooked(self._select(self.hook_conv(u)))
        start = 0 if state is None else state.length
        before = None if state is None else state.ssm
        if form is Form.CHUNKED and not attached(self.hook_z, self.hook_gate):
            # Nothing looks between scan and gate: the scan multiplies with the gate itself.
            y, ssm = self._chunked(scan, before, z)
        else:
            if form is Form.RECURRENT:
                y, ssm = self._recurrent(scan, before, start)
            else:
                y, ssm = self._chunked(scan, before)
                if form is Form.PARALLEL:
                    y = self._parallel(scan, before)
            y = self._gated(self.hook_z(y[..., None]), z)
        return self._output(y), Mamba1State(ssm=ssm, conv=conv, length=start + x.shape[1])

    def _gated(self, y: Float[Tensor, "batch seq d_inner 1"], z: Tensor) -> Tensor:
        return y[..., 0] * self.hook_gate(F.silu(z))

    def output_from_z(self, x: Tensor, z: Tensor) -> Tensor:
        """See `Mixer.output_from_z`: x gives the gate."""
        gate = self.in_proj(x).chunk(2, -1)[1]
        return self._output(self._gated(z, gate.repeat(len(z) // len(x), 1, 1)))

    def _select(self, u: Float[Tensor, "batch seq d_inner"]) -> _Scan:
        """B, C and dt from the convolution's output."""
        if self.config.constant_bcdt:
            shape = (*u.shape[:2], -1)
            dt = self._steps(torch.zeros_like(self.dt_bias), self.dt_bias)
            return _Scan(u, dt.expand(shape), self.B.expand(shape), self.C.expand(shape))
        widths = (self.config.dt_rank, self.d_state, self.d_state)
        dt_low, B, C = self.x_proj(u).split(widths, -1)
        dt = self._steps(F.linear(dt_low, self.dt_proj.weight), self.dt_proj.bias)
        return _Scan(u, dt, B, C)

    def _hooked(self, scan: _Scan) -> _Scan:
        C = self.hook_q(scan.C[:, :, None])[:, :, 0]
        B = self.hook_k(scan.B[:, :, None])[:, :, 0]
        u = self.hook_v(scan.u[..., None])[..., 0]
        return _Scan(u, self.hook_dt(scan.dt), B, C)

    def _chunked(
        self, scan: _Scan, state: Tensor | None, z: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return selective_scan.selective_scan(
            scan.u, scan.dt, self.A_log, scan.B, scan.C, D=self.D, z=z, state=state
        )

    def _parallel(self, scan: _Scan, state: Tensor | None) -> Tensor:
        """A @ u + D u and what the initial state adds; A in blocks of channels where no hook looks at it."""
        step = self.d_inner
        if not attached(self.hook_pattern):
            batch, seq = scan.u.shape[:2]
            step = max(1, BLOCK_BYTES // (batch * seq * seq * scan.u.element_size()))
        outputs = []
        for start in range(0, self.d_inner, step):
            channels = slice(start, start + step)
            pattern = selective_scan.pattern(scan.dt, self.A_log, scan.B, scan.C, channels=channels)
            if step == self.d_inner:
                pattern = self.hook_pattern(pattern)
            outputs.append(torch.einsum("bcij,bjc->bic", pattern, scan.u[..., channels].to(pattern.dtype)))
        y = torch.cat(outputs, -1).to(scan.u.dtype) + self.D * scan.u
        if state is None:
            return y
        nothing = torch.zeros_like(scan.u)
        return y + self._chunked(scan._replace(u=nothing), state)[0]

    def _recurrent(self, scan: _Scan, state: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """Token by token; what the three points of the recurrence return is carried on."""
        points = (self.hook_decay, self.hook_write, self.hook_state)
        hooked = attached(*points)
        outputs = []
        for t in range(scan.u.shape[1]):
            here = _Scan(*(part[:, t] for part in scan))
            if not hooked:
                y, state = selective_scan.step(
                    here.u, here.dt, self.A_log, here.B, here.C, D=self.D, state=state
                )
            else:
                for point in points:
                    point.ctx["position"] = start + t
                y, state = self._hooked_step(here, state)
            outputs.append(y)
        return torch.stack(outputs, 1), state

    def _hooked_step(self, here: _Scan, state: Tensor | None) -> tuple[Tensor, Tensor]:
        log_decay = self.hook_decay(here.dt[..., None] * -torch.exp(self.A_log))
        write = self.hook_write((here.dt * here.u)[..., None] * here.B[:, None])
        state = self.hook_state(write if state is None else torch.exp(log_decay) * state + write)
        y = (state * here.C[:, None]).sum(-1) + self.D * here.u
        return y.to(here.u.dtype), state

    def implied_attention(
        self, x: Float[Tensor, "batch seq d_model"]
    ) -> Float[Tensor, "batch head dest=seq src=seq"]:
        """The scan's A per channel, signed, without D and gate. `read` needs less memory."""
        scan = self._parts(x).scan
        return selective_scan.pattern(scan.dt, self.A_log, scan.B, scan.C)

    def _parts(self, x: Float[Tensor, "batch seq d_model"]) -> Mamba1Parts:
        """Everything a reading needs, of a whole sequence and without hooks."""
        inner, z = self.in_proj(x).chunk(2, -1)
        pre = self._pre(inner)
        return Mamba1Parts(mixer=self, inner=inner, pre=pre, scan=self._select(F.silu(pre)), gate=F.silu(z))

    def _reading(self, parts: Mamba1Parts, reading: str, units: str) -> Reading:
        return mamba1_reading(parts, reading, units)

    def init_state(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Mamba1State:
        """Zeros; the scan's state is kept in float32 or better."""
        own = self._own(batch, device, dtype)
        conv = torch.zeros(batch, self.config.d_conv - 1, self.d_inner, **own)
        own["dtype"] = torch.promote_types(own["dtype"], torch.float32)
        return Mamba1State(ssm=torch.zeros(batch, self.d_inner, self.d_state, **own), conv=conv, length=0)

    def state_size(self) -> int:
        """Numbers in the state of one sequence, whatever its length."""
        return self.d_inner * (self.d_state + self.config.d_conv - 1)

    @torch.no_grad()
    def reset_parameters(self, *, std: float, out_std: float, generator: torch.Generator | None) -> None:
        """Mamba's own scheme; `std` is not used: the projections into the scan are uniform by fan-in.

        "standard": A = 1 .. d_state, dt log-uniform in dt_min .. dt_max. "slow": dt = 0.1 and time constants
        of 8 .. 512 tokens, log-spaced over the state indices. D = 1.
        """
        config = self.config
        self._reset_block(out_std, generator)
        steps = dt_bias(
            self.d_inner, init=config.init, dt_min=config.dt_min, dt_max=config.dt_max, generator=generator
        )
        if config.constant_bcdt:
            self.B.normal_(0, 1, generator=generator)
            self.C.normal_(0, 1, generator=generator)
            self.dt_bias.copy_(steps)
        else:
            fan_in_uniform(self.x_proj.weight, generator=generator)
            bound = config.dt_rank**-0.5
            self.dt_proj.weight.uniform_(-bound, bound, generator=generator)
            self.dt_proj.bias.copy_(steps)
        slow = config.init == "slow"
        rates = slow_A_log(self.d_state) if slow else torch.arange(1.0, self.d_state + 1).log()
        self.A_log.copy_(rates.expand_as(self.A_log))

    def _factors(self, parts: Mamba1Parts) -> OVFactors:
        """The layer as one unit: in_proj, sum of taps, mean sigmoid(pre), mean gate, out_proj."""
        W_V = self.in_proj.weight[: self.d_inner].T * self._tap_gain(parts.pre)
        W_O = parts.gate.mean((0, 1))[:, None] * self.out_proj.weight.T
        return OVFactors(W_V[None], W_O[None], "mean gate, mean sigmoid(pre), sum of the convolution's taps")

    @property
    def W_V(self) -> Float[Tensor, "head d_model 1"]:
        """Value projection by channel (before the convolution)."""
        return self.in_proj.weight[: self.d_inner, :, None]
