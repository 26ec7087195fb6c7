"""Sequence mixers and their registry: `kind` in a configuration -> class.

A new mixer is one file with a subclass of `Mixer`, one configuration with its `kind`, and one line here.
"""

from models.config import LanguageModelConfig, MixerConfig
from models.errors import ConfigError, closest
from models.mixers.base import Mixer
from models.mixers.linear_attention import LinearAttention
from models.mixers.mamba1 import Mamba1
from models.mixers.mamba2 import Mamba2
from models.mixers.softmax_attention import SoftmaxAttention

MIXERS: dict[str, type[Mixer]] = {
    cls.kind: cls for cls in (SoftmaxAttention, LinearAttention, Mamba1, Mamba2)
}


def make_mixer(config: MixerConfig, model: LanguageModelConfig) -> Mixer:
    """The mixer of one layer. Rotary positions, where the model has them, go to softmax attention only.

    Raises:
        ConfigError: a kind that is not registered, or widths that do not fit together.
    """
    if config.kind not in MIXERS:
        raise ConfigError(f"mixer kind {config.kind!r} is unknown{closest(config.kind, MIXERS)}")
    rope = model.rope if config.kind == "softmax" and model.positions == "rope" else None
    return MIXERS[config.kind](config, model.d_model, n_ctx=model.n_ctx, rope=rope)
