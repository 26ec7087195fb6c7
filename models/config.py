"""Configurations of models and mixers: frozen, keyword-only, an exact round trip through plain JSON values.

Every configuration has `to_dict()` and `from_dict(values)`. An unknown key, a missing one or a value of the
wrong type is a `ConfigError` that names the key, the value and what is accepted.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, Literal, Self

from models.errors import ConfigError
from models.plain_config import LARGEST, PlainConfig
from models.rope_config import RopeConfig


class MixerConfig(PlainConfig):
    """Base of the mixer configurations; `kind` is the name under which the mixer is registered."""

    kind: str

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """As `PlainConfig.from_dict`; on MixerConfig itself, of the class that "kind" names."""
        return mixer_config(values) if cls is MixerConfig else super().from_dict(values)

    def resolved(self, d_model: int) -> Self:
        """The same configuration with every None that stands for a default width filled in."""
        return self


@dataclass(frozen=True, kw_only=True)
class SoftmaxAttentionConfig(MixerConfig):
    """Causal softmax attention; options: grouped keys and values, a window, a learnable sink logit.

    `scale` multiplies the logits: any finite number, None is 1/sqrt(d_head). `smeared_keys` mixes each key
    with the one before it, by a learnable share per key head.
    """

    kind: Literal["softmax"] = "softmax"
    n_heads: int
    n_kv_heads: int | None = None
    d_head: int | None = None
    window: int | None = None
    sink: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    d_conv: int = 0
    qk_norm: bool = False
    scale: float | None = None
    smeared_keys: bool = False

    def _check(self) -> None:
        self._require_sizes("n_heads", "d_head", "window")
        self._require(
            self.n_kv_heads is None or (self.n_kv_heads > 0 and self.n_heads % self.n_kv_heads == 0),
            "n_kv_heads",
            f"a divisor of n_heads = {self.n_heads}",
        )
        self._require(0 <= self.d_conv <= LARGEST, "d_conv", "0 (none) or the number of taps")

    def resolved(self, d_model: int) -> Self:
        d_head = self.d_head or _divided(d_model, self.n_heads)
        _check_width("n_heads * d_head", self.n_heads * d_head)
        return self.replace(n_kv_heads=self.n_kv_heads or self.n_heads, d_head=d_head)


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig(MixerConfig):
    """Linear attention with a feature map, normalised or not, with a short convolution as an option."""

    kind: Literal["linear"] = "linear"
    n_heads: int
    d_head: int | None = None
    feature_map: Literal["elu_plus_one", "relu", "identity"] = "elu_plus_one"
    normalise: bool = True
    eps: float = 1e-6
    d_conv: int = 0
    qkv_bias: bool = False
    out_bias: bool = False

    def _check(self) -> None:
        self._require_sizes("n_heads", "d_head")
        self._require(self.eps >= 0, "eps", "a number of at least 0")
        self._require(0 <= self.d_conv <= LARGEST, "d_conv", "0 (none) or the number of taps")

    def resolved(self, d_model: int) -> Self:
        d_head = self.d_head or _divided(d_model, self.n_heads)
        _check_width("n_heads * d_head", self.n_heads * d_head)
        return self.replace(d_head=d_head)


@dataclass(frozen=True, kw_only=True)
class Mamba1Config(MixerConfig):
    """Mamba-1: convolution, selective scan per channel, gate. `constant_bcdt` makes it the S4D control."""

    kind: Literal["mamba1"] = "mamba1"
    d_inner: int | None = None
    d_state: int = 16
    d_conv: int = 4
    dt_rank: int | None = None
    conv_bias: bool = True
    proj_bias: bool = False
    dt_min: float = 1e-3
    dt_max: float = 0.1
    init: Literal["standard", "slow"] = "standard"
    constant_bcdt: bool = False

    def _check(self) -> None:
        self._require_sizes("d_state", "d_conv", "d_inner", "dt_rank")
        self._require(0 < self.dt_min <= self.dt_max, "dt_min", f"above 0 and at most dt_max = {self.dt_max}")

    def resolved(self, d_model: int) -> Self:
        return self.replace(
            d_inner=self.d_inner or 2 * d_model, dt_rank=self.dt_rank or math.ceil(d_model / 16)
        )


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(MixerConfig):
    """Mamba-2 (SSD). Without `d_head` and `n_heads`, heads are 64 wide (d_inner if that is less)."""

    kind: Literal["mamba2"] = "mamba2"
    d_inner: int | None = None
    d_head: int | None = None
    n_heads: int | None = None
    d_state: int = 64
    n_groups: int = 1
    d_conv: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    gated_norm: bool = True
    norm_eps: float = 1e-5
    init: Literal["standard", "slow"] = "standard"
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_limits: tuple[float, float] | None = None

    def _check(self) -> None:
        self._require_sizes("d_state", "n_groups", "d_conv", "d_inner", "d_head", "n_heads")
        self._require(self.norm_eps >= 0, "norm_eps", "a number of at least 0")
        self._require(0 < self.dt_min <= self.dt_max, "dt_min", f"above 0 and at most dt_max = {self.dt_max}")
        self._require(
            self.dt_limits is None or self.dt_limits[0] < self.dt_limits[1], "dt_limits", "None or low < high"
        )

    def resolved(self, d_model: int) -> Self:
        d_inner = self.d_inner or 2 * d_model
        d_head = self.d_head or (_divided(d_inner, self.n_heads) if self.n_heads else min(64, d_inner))
        _check_width("n_groups * d_state", self.n_groups * self.d_state)
        n_heads = self.n_heads or _divided(d_inner, d_head)
        if n_heads * d_head != d_inner:
            raise ConfigError(
                f"Mamba2Config needs n_heads * d_head = d_inner, but {n_heads} * {d_head} is not {d_inner}"
            )
        if n_heads % self.n_groups:
            raise ConfigError(
                f"Mamba2Config.n_groups is {self.n_groups}; accepted: a divisor of n_heads = {n_heads}"
            )
        return self.replace(d_inner=d_inner, d_head=d_head, n_heads=n_heads)


# kind -> configuration. A new mixer adds its configuration here.
MIXER_CONFIGS: dict[str, type[MixerConfig]] = {
    "softmax": SoftmaxAttentionConfig,
    "linear": LinearAttentionConfig,
    "mamba1": Mamba1Config,
    "mamba2": Mamba2Config,
}


@dataclass(frozen=True, kw_only=True)
class MLPConfig(PlainConfig):
    """A block's MLP: `act(x W_in)`, or `act(x W_gate) * (x W_in)` when gated, then W_out."""

    d_mlp: int
    act: Literal["relu", "relu2", "gelu", "gelu_new", "silu"] = "gelu"
    gated: bool = False
    bias: bool = True

    def _check(self) -> None:
        self._require_sizes("d_mlp")


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(PlainConfig):
    """A language model of `n_layers` blocks, each with its own mixer.

    `n_ctx` bounds the sequences of a model with learned positions; with RoPE or without positions it is the
    length that the model is meant for, and longer sequences run. `out_init_scale` multiplies `init_std` for
    the weights that write to the residual stream; None is 1/sqrt(2 n_layers). `residual_in_fp32` keeps the
    residual stream in float32 when the weights are of a lower precision. `bos` is the id of the
    beginning-of-sequence token that the model was trained with, None where there was none.
    """

    d_model: int
    n_layers: int
    d_vocab: int
    n_ctx: int
    mixers: tuple[MixerConfig, ...]
    mlp: MLPConfig | None = None
    norm: Literal["rms", "layer", "none"] = "rms"
    norm_eps: float = 1e-5
    norm_bias: bool = False
    positions: Literal["learned", "rope", "none"] = "none"
    rope: RopeConfig | None = None
    tied: bool = False
    parallel_residual: bool = False
    unembed_bias: bool = False
    residual_in_fp32: bool = False
    init_std: float = 0.02
    out_init_scale: float | None = None
    seed: int = 0
    bos: int | None = None

    def _check(self) -> None:
        self._require_sizes("d_model", "n_layers", "d_vocab", "n_ctx")
        for name in ("norm_eps", "init_std"):
            self._require(getattr(self, name) >= 0, name, "a number of at least 0")
        self._require(
            self.out_init_scale is None or self.out_init_scale >= 0,
            "out_init_scale",
            "None or a number of at least 0",
        )
        self._require(-(1 << 63) <= self.seed < 1 << 63, "seed", "a number of 64 bits")
        if len(self.mixers) != self.n_layers:
            raise ConfigError(
                f"LanguageModelConfig.mixers has {len(self.mixers)} entries; accepted: one for each of the "
                f"n_layers = {self.n_layers} layers"
            )
        self._require(
            (self.rope is None) == (self.positions != "rope"),
            "rope",
            f"a RopeConfig exactly when positions is 'rope' (it is {self.positions!r})",
        )
        self._require(
            not self.norm_bias or self.norm == "layer", "norm_bias", f"False with norm {self.norm!r}"
        )
        # It is the norm that brings the residual stream back to the dtype of the weights.
        self._require(
            not self.residual_in_fp32 or self.norm != "none", "residual_in_fp32", "False without norm"
        )
        self._require(
            not self.parallel_residual or self.mlp is not None, "parallel_residual", "False without an MLP"
        )
        self._require(
            self.bos is None or 0 <= self.bos < self.d_vocab, "bos", f"None or 0..{self.d_vocab - 1}"
        )
        for mixer in self.mixers:
            mixer.resolved(self.d_model)

    @property
    def residual_scale(self) -> float:
        """Factor on `init_std` for weights that write to the residual stream."""
        return (2 * self.n_layers) ** -0.5 if self.out_init_scale is None else self.out_init_scale

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that two configurations share exactly when they are equal."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def mixer_config(values: dict[str, Any]) -> MixerConfig:
    """The mixer configuration that a dictionary with "kind" describes.

    Raises:
        ConfigError: no "kind", an unknown one, or values that its configuration refuses.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"a mixer needs a dictionary, not {type(values).__name__}: {values!r}")
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in MIXER_CONFIGS:
        raise ConfigError(f"a mixer has kind {kind!r}; accepted: {', '.join(MIXER_CONFIGS)}")
    return MIXER_CONFIGS[kind].from_dict(values)


def _check_width(name: str, width: int) -> None:
    if width > LARGEST:
        raise ConfigError(f"{name} is {width}; accepted: up to {LARGEST}")


def _divided(width: int, n: int) -> int:
    if width % n:
        raise ConfigError(
            f"a width of {width} does not divide into {n} equal heads; give d_head or another n_heads"
        )
    return width // n
