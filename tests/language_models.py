"""The small language models that tests share: every mixer, every kind of block."""

import torch

from models.config import (
    LanguageModelConfig,
    LinearAttentionConfig,
    Mamba1Config,
    Mamba2Config,
    MLPConfig,
    RopeConfig,
    SoftmaxAttentionConfig,
)

D_VOCAB, N_CTX = 13, 24

SOFTMAX = SoftmaxAttentionConfig(n_heads=2)
LINEAR = LinearAttentionConfig(n_heads=2, d_conv=3)
MAMBA1 = Mamba1Config(d_state=4, d_inner=6, dt_min=0.5, dt_max=2.0)
MAMBA2 = Mamba2Config(d_state=4, d_head=8, n_groups=2, dt_min=0.2, dt_max=1.0)


def config(*mixers, **options) -> LanguageModelConfig:
    """A model of width 16 with these mixers. Weights are large, so that nothing is lost in rounding."""
    options = {"init_std": 0.3, "out_init_scale": 1.0, "seed": 5} | options
    return LanguageModelConfig(
        d_model=16, n_layers=len(mixers), d_vocab=D_VOCAB, n_ctx=N_CTX, mixers=mixers, **options
    )


ROPE = {"positions": "rope", "rope": RopeConfig()}
CONFIGS = {
    "softmax": config(SOFTMAX, SOFTMAX, **ROPE),
    "linear": config(LINEAR, LINEAR),
    "mamba1": config(MAMBA1, MAMBA1),
    "mamba2": config(MAMBA2, MAMBA2),
    "hybrid": config(
        MAMBA1, SOFTMAX, MAMBA2, LINEAR, **ROPE, mlp=MLPConfig(d_mlp=20, act="silu", gated=True)
    ),
    "gpt2": config(
        *[SoftmaxAttentionConfig(n_heads=2, qkv_bias=True, out_bias=True)] * 2,
        positions="learned",
        norm="layer",
        norm_bias=True,
        tied=True,
        mlp=MLPConfig(d_mlp=20, act="gelu_new"),
    ),
    "gpt_neox": config(
        *[SoftmaxAttentionConfig(n_heads=2, qkv_bias=True, out_bias=True)] * 2,
        positions="rope",
        rope=RopeConfig(rotary_dim=4),
        norm="layer",
        norm_bias=True,
        parallel_residual=True,
        mlp=MLPConfig(d_mlp=20),
    ),
    "llama": config(
        *[SoftmaxAttentionConfig(n_heads=4, n_kv_heads=2)] * 2,
        **ROPE,
        mlp=MLPConfig(d_mlp=20, act="silu", gated=True, bias=False),
    ),
    "smeared": config(SoftmaxAttentionConfig(n_heads=2, smeared_keys=True), **ROPE),
    "plain": config(SOFTMAX, norm="none", unembed_bias=True),
}
# The models whose layers all have the same number of heads.
UNIFORM = [name for name in CONFIGS if name != "hybrid"]


def build(name: str, *, dtype: torch.dtype = torch.float64):
    """The model of a name in CONFIGS, in evaluation mode; biases and gains are drawn as well."""
    from models.language_model import LanguageModel

    model = LanguageModel(CONFIGS[name])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype).eval()


def tokens(batch: int = 2, seq: int = 9, seed: int = 0) -> torch.Tensor:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(D_VOCAB, (batch, seq), generator=generator)
