"""Softmax attention as a mixer: grouped keys and values, window, sink, rotary positions, convolution."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import softmax_attention as kernel
from kernels.softmax_attention import KVState
from models.config import RopeConfig, SoftmaxAttentionConfig
from models.errors import ConfigError
from models.form import Form
from models.lens import attached
from models.mixers.attention import Attention
from models.mixers.base import ALL_FORMS, PARALLEL_ONLY
from models.mixers.entries import SoftmaxEntries
from models.mixers.reading import Reading
from models.positions import Rope

QK_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class SoftmaxState:
    """Rotated keys and values of the `kv.length` positions seen, and the convolution's last inputs.

    `smear` is the last key before smearing, where keys are smeared.
    """

    kv: KVState
    conv: Float[Tensor, "batch width_1 channel"] | None = None
    smear: Float[Tensor, "batch kv_head d_head"] | None = None


class SoftmaxAttention(Attention):
    """Causal softmax attention.

    Order: projection, short convolution (if d_conv), RMS norm per head of queries and keys (if qk_norm),
    `hook_k_own` and smearing (if smeared_keys), `hook_q|k|v`, rotation (if rope), `hook_rot_q|k`, attention.

    Smeared keys: k_j <- sigmoid(smear) k_j + (1 - sigmoid(smear)) k_{j-1}, one learnable number per key head,
    nothing before the sequence (Olsson et al. 2022, arXiv:2209.11895: with them one layer learns induction).
    Keys are smeared before they are rotated.
    """

    kind = "softmax"
    state_type = SoftmaxState

    def __init__(
        self,
        config: SoftmaxAttentionConfig,
        d_model: int,
        *,
        n_ctx: int,
        rope: RopeConfig | None = None,
    ):
        config = config.resolved(d_model)
        super().__init__(
            d_model,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            d_head=config.d_head,
            d_conv=config.d_conv,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
        )
        self.config = config
        self.n_ctx = n_ctx
        self.scale = 1 / math.sqrt(self.d_head) if config.scale is None else config.scale
        self.rope = None if rope is None else Rope(rope, self.d_head, n_ctx=n_ctx)
        self.sink = nn.Parameter(torch.zeros(self.n_heads)) if config.sink else None
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.ones(self.d_head))
            self.k_norm = nn.Parameter(torch.ones(self.d_head))
        self._add_hooks({"hook_attn_scores": PARALLEL_ONLY, "hook_pattern": PARALLEL_ONLY})
        self.smear = nn.Parameter(torch.zeros(self.n_kv_heads)) if config.smeared_keys else None
        if config.smeared_keys:
            self._add_hooks({"hook_k_own": ALL_FORMS})
        if rope is not None:
            self._add_hooks({"hook_rot_q": ALL_FORMS, "hook_rot_k": ALL_FORMS})

    def evaluate(
        self, x: Float[Tensor, "batch seq d_model"], form: Form, state: SoftmaxState | None
    ) -> tuple[Float[Tensor, "batch seq d_model"], SoftmaxState]:
        """Output and state; see `Mixer.evaluate`."""
        if form is Form.RECURRENT and state is None:
            state = self.init_state(x.shape[0], device=x.device, dtype=x.dtype)
        q, k, v, conv = self._project(x, form, None if state is None else state.conv)
        q, k = self._normed(q, k)
        smear = None
        if self.smear is not None:
            k = self.hook_k_own(k)
            k, smear = self._smeared(k, None if state is None else state.smear)
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        if self.rope is not None:
            offset = 0 if state is None else state.kv.length
            q, k = self.hook_rot_q(self.rope(q, offset)), self.hook_rot_k(self.rope(k, offset))
        if form is Form.RECURRENT:
            z, kv = self._recurrent(q, k, v, state.kv)
        else:
            kv = self._extended(k, v, None if state is None else state.kv)
            attend = self._parallel if form is Form.PARALLEL else self._chunked
            z = attend(q, kv.k, kv.v)
            kv = self._trimmed(kv)
        return self._output(z), SoftmaxState(kv=kv, conv=conv, smear=smear)

    def _options(self) -> dict:
        return {"scale": self.scale, "window": self.config.window, "sink": self.sink}

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not self.config.qk_norm:
            return q, k
        shape = (self.d_head,)
        return F.rms_norm(q, shape, self.q_norm, QK_NORM_EPS), F.rms_norm(k, shape, self.k_norm, QK_NORM_EPS)

    def _smeared(
        self,
        k: Float[Tensor, "batch seq kv_head d_head"],
        before: Float[Tensor, "batch kv_head d_head"] | None,
    ) -> tuple[Float[Tensor, "batch seq kv_head d_head"], Float[Tensor, "batch kv_head d_head"]]:
        """Each key mixed with the one before it, and the last key as it was."""
        first = torch.zeros_like(k[:, :1]) if before is None else before[:, None]
        own = torch.sigmoid(self.smear)[:, None].to(k.dtype)
        return own * k + (1 - own) * torch.cat((first, k[:, :-1]), 1), k[:, -1]

    def _parallel(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if attached(self.hook_attn_scores):
            pattern = self._softmax(self.hook_attn_scores(self._scores(q, k)))
        else:
            pattern = kernel.pattern(q, k, **self._options())
        pattern = self.hook_pattern(pattern)
        return torch.einsum("bhij,bjhd->bihd", pattern, self._values_by_head(v).to(pattern.dtype)).to(v.dtype)

    def _chunked(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel.softmax_attention(q, k, v, **self._options())

    def _recurrent(self, q: Tensor, k: Tensor, v: Tensor, kv: KVState) -> tuple[Tensor, KVState]:
        outputs = []
        for t in range(q.shape[1]):
            here = slice(t, t + 1)
            z, kv = kernel.step(q[:, here], k[:, here], v[:, here], kv, **self._options())
            outputs.append(z)
        return torch.cat(outputs, 1), kv

    def _scores(self, q: Tensor, k: Tensor) -> Float[Tensor, "batch head dest src"]:
        """Scaled logits, -inf where attention is not allowed."""
        scores = torch.einsum("bihd,bjhd->bhij", q, self._values_by_head(k)) * self.scale
        n_dest, n_src = scores.shape[-2:]
        src = torch.arange(n_src, device=q.device)
        dest = src[n_src - n_dest :, None]
        hidden = src > dest
        if self.config.window is not None:
            hidden = hidden | (src <= dest - self.config.window)
        return scores.masked_fill(hidden, -math.inf)

    def _softmax(self, scores: Tensor) -> Tensor:
        if self.sink is None:
            return scores.softmax(-1)
        sink = self.sink[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, sink.to(scores.dtype)), -1).softmax(-1)[..., :-1]

    def _extended(self, k: Tensor, v: Tensor, kv: KVState | None) -> KVState:
        if kv is None:
            return KVState(k=k, v=v, length=k.shape[1])
        if (kv.k.shape[0], *kv.k.shape[2:]) != (k.shape[0], *k.shape[2:]):
            raise ConfigError(
                f"the cache holds keys {list(kv.k.shape)} [batch seq head d_head]; accepted: "
                f"[{k.shape[0]} seq {k.shape[2]} {k.shape[3]}], as the new ones"
            )
        return KVState(k=torch.cat((kv.k, k), 1), v=torch.cat((kv.v, v), 1), length=kv.length + k.shape[1])

    def _trimmed(self, kv: KVState) -> KVState:
        """A window needs only the last window - 1 positions."""
        window = self.config.window
        if window is None or kv.k.shape[1] < window:
            return kv
        start = kv.k.shape[1] - (window - 1)
        return KVState(k=kv.k[:, start:], v=kv.v[:, start:], length=kv.length)

    def implied_attention(
        self, x: Float[Tensor, "batch seq d_model"]
    ) -> Float[Tensor, "batch head dest=seq src=seq"]:
        """The attention probabilities."""
        q, k, _ = self._inputs(x)
        return kernel.pattern(q, k, **self._options())

    def _inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys as they are multiplied, and values; without hooks."""
        q, k, v = self._unhooked(x)
        q, k = self._normed(q, k)
        if self.smear is not None:
            k, _ = self._smeared(k, None)
        if self.rope is not None:
            q, k = self.rope(q), self.rope(k)
        return q, k, v

    def _read(self, x: Tensor, reading: str, units: str) -> Reading:
        q, k, v = self._inputs(x)
        return self._reading(
            x,
            reading,
            v,
            normalisation="none",
            entries=SoftmaxEntries(q=q, k=k, **self._options()),
            make_pattern=lambda: kernel.pattern(q, k, **self._options()),
        )

    def init_state(
        self, batch: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> SoftmaxState:
        """An empty key/value cache."""
        own = self._own(batch, device, dtype)
        kv = kernel.empty_state(batch, self.n_kv_heads, self.d_head, self.d_head, **own)
        smear = None if self.smear is None else torch.zeros(batch, self.n_kv_heads, self.d_head, **own)
        return SoftmaxState(kv=kv, conv=self._conv_state(batch, own), smear=smear)

    def state_size(self) -> int:
        """Numbers in the cache of one sequence of n_ctx positions (with a window, window - 1 of them)."""
        window = self.config.window
        kept = self.n_ctx if window is None else min(self.n_ctx, window - 1)
        smeared = 0 if self.smear is None else self.n_kv_heads * self.d_head
        return 2 * kept * self.n_kv_heads * self.d_head + self._conv_state_size() + smeared

    @torch.no_grad()
    def reset_parameters(self, *, std: float, out_std: float, generator: torch.Generator | None) -> None:
        """As in `Attention`; the sink's and the smear's logits start at 0, norm gains at 1."""
        super().reset_parameters(std=std, out_std=out_std, generator=generator)
        if self.smear is not None:
            self.smear.zero_()
        if self.sink is not None:
            self.sink.zero_()
        if self.config.qk_norm:
            self.q_norm.fill_(1)
            self.k_norm.fill_(1)
