"""Every mixer in the configurations that its tests run: name -> (configuration, rotary positions or None)."""

import torch

from models.config import (
    LinearAttentionConfig,
    Mamba1Config,
    Mamba2Config,
    MixerConfig,
    RopeConfig,
    SoftmaxAttentionConfig,
)
from models.mixers import MIXERS
from models.mixers.base import Mixer

D_MODEL = 12

MIXER_CONFIGS: dict[str, tuple[MixerConfig, RopeConfig | None]] = {
    "softmax": (SoftmaxAttentionConfig(n_heads=3), None),
    "softmax_gqa_rope_window": (
        SoftmaxAttentionConfig(n_heads=4, n_kv_heads=2, d_head=6, window=5, qkv_bias=True, out_bias=True),
        RopeConfig(rotary_dim=4),
    ),
    "softmax_conv_sink": (
        SoftmaxAttentionConfig(n_heads=2, n_kv_heads=1, sink=True, d_conv=3, qk_norm=True, out_bias=True),
        RopeConfig(layout="adjacent"),
    ),
    "softmax_smeared": (
        SoftmaxAttentionConfig(n_heads=4, n_kv_heads=2, d_head=6, window=6, smeared_keys=True),
        RopeConfig(),
    ),
    "linear": (LinearAttentionConfig(n_heads=3, qkv_bias=True), None),
    "linear_conv": (LinearAttentionConfig(n_heads=2, d_conv=4, out_bias=True), None),
    "linear_raw": (LinearAttentionConfig(n_heads=2, feature_map="identity", normalise=False, d_conv=2), None),
    "mamba1": (Mamba1Config(d_inner=10, d_state=3), None),
    "mamba1_bias": (Mamba1Config(d_inner=8, d_state=4, d_conv=2, proj_bias=True, init="slow"), None),
    "mamba1_constant": (Mamba1Config(d_inner=6, d_state=4, constant_bcdt=True), None),
    "mamba2": (Mamba2Config(d_inner=16, d_head=4, d_state=5), None),
    "mamba2_groups": (
        Mamba2Config(d_inner=24, n_heads=4, d_state=3, n_groups=2, proj_bias=True, init="slow", d_conv=3),
        None,
    ),
    "mamba2_plain": (
        Mamba2Config(
            d_inner=8, d_head=4, d_state=3, conv_bias=False, gated_norm=False, dt_limits=(0.01, 0.05)
        ),
        None,
    ),
}


def build(name: str, *, seed: int = 0, scale: float = 0.4, dtype: torch.dtype = torch.float64) -> Mixer:
    """The named mixer with weights large enough that every path matters, biases and gains included."""
    config, rope = MIXER_CONFIGS[name]
    generator = torch.Generator().manual_seed(seed)
    mixer = MIXERS[config.kind](config, D_MODEL, n_ctx=128, rope=rope)
    mixer.reset_parameters(std=scale, out_std=scale, generator=generator)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return mixer.to(dtype)


def inputs(seq: int, *, batch: int = 2, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A batch of normal residual-stream vectors."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, seq, D_MODEL, generator=generator, dtype=dtype)
