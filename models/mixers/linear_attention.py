"""Linear attention as a mixer: a feature map, with or without normaliser and short convolution."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kernels import gated_linear_attention as kernel
from kernels.gated_linear_attention import FEATURE_MAPS, LinearState, elu_plus_one
from kernels.packed_linear_attention import packed_linear_attention
from models.config import LinearAttentionConfig, RopeConfig
from models.errors import ConfigError
from models.form import Form
from models.lens import attached
from models.mixers.attention import Attention
from models.mixers.base import PARALLEL_ONLY, RECURRENT_ONLY
from models.mixers.entries import LinearEntries
from models.mixers.reading import Reading


@dataclass(frozen=True, kw_only=True)
class LinearAttentionState:
    """Sums of key-value products and of keys, the convolution's last inputs, the number of positions seen."""

    linear: LinearState
    length: int
    conv: Float[Tensor, "batch width_1 channel"] | None = None


class LinearAttention(Attention):
    """o_i = sum_j phi(q_i).phi(k_j) v_j, divided by eps + sum_j phi(q_i).phi(k_j) where `normalise`.

    `hook_q` and `hook_k` are before the feature map phi.
    """

    kind = "linear"
    state_type = LinearAttentionState

    def __init__(
        self,
        config: LinearAttentionConfig,
        d_model: int,
        *,
        n_ctx: int,
        rope: RopeConfig | None = None,
    ):
        config = config.resolved(d_model)
        if rope is not None:
            raise ConfigError(
                "rope is given to a linear-attention mixer; accepted: None (it has no rotary positions)"
            )
        super().__init__(
            d_model,
            n_heads=config.n_heads,
            n_kv_heads=config.n_heads,
            d_head=config.d_head,
            d_conv=config.d_conv,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
        )
        self.config = config
        self.feature_map = FEATURE_MAPS[config.feature_map]
        self._add_hooks({"hook_pattern": PARALLEL_ONLY, "hook_state": RECURRENT_ONLY})

    def evaluate(
        self, x: Float[Tensor, "batch seq d_model"], form: Form, state: LinearAttentionState | None
    ) -> tuple[Float[Tensor, "batch seq d_model"], LinearAttentionState]:
        """Output and state; see `Mixer.evaluate`."""
        qkv, conv = self._packed(x, form, None if state is None else state.conv)
        if self._stays_packed(form, state):
            z, after = packed_linear_attention(qkv, self.n_heads, **self._options())
            return self._output(z), LinearAttentionState(linear=after, conv=conv, length=x.shape[1])
        q, k, v = self._heads(qkv)
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        q, k = self.feature_map(q), self.feature_map(k)
        start = 0 if state is None else state.length
        before = None if state is None else state.linear
        if form is Form.RECURRENT:
            z, after = self._recurrent(q, k, v, before, start)
        else:
            z, after = kernel.gated_linear_attention(q, k, v, state=before, **self._options())
            if form is Form.PARALLEL:
                z = self._parallel(q, k, v, before)
        length = start + x.shape[1]
        return self._output(z), LinearAttentionState(linear=after, conv=conv, length=length)

    def _stays_packed(self, form: Form, state: LinearAttentionState | None) -> bool:
        """Whether the projections are evaluated side by side: in training, where nothing looks at a part."""
        fits = form is Form.CHUNKED and state is None and self.feature_map is elu_plus_one
        seen = attached(self.hook_q, self.hook_k, self.hook_v)
        return fits and not seen and torch.is_grad_enabled()

    def _options(self) -> dict:
        return {"normalise": self.config.normalise, "eps": self.config.eps if self.config.normalise else 0.0}

    def _parallel(self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None) -> Tensor:
        pattern = self.hook_pattern(kernel.pattern(q, k, state=state, **self._options()))
        z = torch.einsum("bhij,bjhd->bihd", pattern, v.to(pattern.dtype)).to(v.dtype)
        if state is None:
            return z
        return z + kernel.gated_linear_attention(q, k, torch.zeros_like(v), state=state, **self._options())[0]

    def _recurrent(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None, start: int
    ) -> tuple[Tensor, LinearState]:
        """Token by token; this position's output and the next position read what `hook_state` returns."""
        hooked = attached(self.hook_state)
        outputs = []
        for t in range(q.shape[1]):
            z, state = kernel.step(q[:, t], k[:, t], v[:, t], state=state, **self._options())
            if hooked:
                self.hook_state.ctx["position"] = start + t
                state = LinearState(s=self.hook_state(state.s), z=state.z)
                z = self._readout(q[:, t], state)
            outputs.append(z)
        return torch.stack(outputs, 1), state

    def _readout(self, q: Float[Tensor, "batch head d_k"], state: LinearState) -> Tensor:
        z = torch.einsum("bhk,bhkv->bhv", q.to(state.s.dtype), state.s)
        if self.config.normalise:
            z = z / ((q * state.z).sum(-1, keepdim=True) + self.config.eps)
        return z.to(q.dtype)

    def implied_attention(
        self, x: Float[Tensor, "batch seq d_model"]
    ) -> Float[Tensor, "batch head dest=seq src=seq"]:
        """phi(q_i).phi(k_j), normalised where the configuration says so."""
        q, k, _ = self._unhooked(x)
        return kernel.pattern(self.feature_map(q), self.feature_map(k), **self._options())

    def _read(self, x: Tensor, reading: str, units: str) -> Reading:
        q, k, v = self._unhooked(x)
        q, k = self.feature_map(q), self.feature_map(k)
        # Only a positive feature map makes the normalised rows weights.
        positive = self.config.normalise and self.config.feature_map != "identity"
        return self._reading(
            x,
            reading,
            v,
            normalisation="none" if positive else "abs_row",
            entries=LinearEntries(q=q, k=k, n_units=self.n_heads, **self._options()),
            make_pattern=lambda: kernel.pattern(q, k, **self._options()),
        )

    def init_state(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LinearAttentionState:
        """Zero sums. They are kept in float32 or better."""
        own = self._own(batch, device, dtype)
        conv = self._conv_state(batch, own)
        own["dtype"] = torch.promote_types(own["dtype"], torch.float32)
        s = torch.zeros(batch, self.n_heads, self.d_head, self.d_head, **own)
        z = torch.zeros(batch, self.n_heads, self.d_head, **own) if self.config.normalise else None
        return LinearAttentionState(linear=LinearState(s=s, z=z), conv=conv, length=0)

    def state_size(self) -> int:
        """Numbers in the state of one sequence, whatever its length."""
        keys = self.d_head if self.config.normalise else 0
        return self.n_heads * (self.d_head * self.d_head + keys) + self._conv_state_size()
