"""What the named runs have in common: models and tasks of one size, so that a run's file says only what is
its own.
"""

from experiments.config import (
    CheckpointConfig,
    EvalConfig,
    ExperimentConfig,
    OptimiserConfig,
    TrainingConfig,
)
from experiments.data.config import DataConfig
from models.config import (
    LanguageModelConfig,
    LinearAttentionConfig,
    Mamba1Config,
    Mamba2Config,
    MixerConfig,
    RopeConfig,
    SoftmaxAttentionConfig,
)

SOFTMAX = SoftmaxAttentionConfig(n_heads=4)
SOFTMAX_CONV = SoftmaxAttentionConfig(n_heads=4, d_conv=4)
LINEAR = LinearAttentionConfig(n_heads=4)
LINEAR_CONV = LinearAttentionConfig(n_heads=4, d_conv=4)
MAMBA1 = Mamba1Config()
MAMBA2 = Mamba2Config(n_heads=4, d_state=32)
MAMBA2_SLOW = Mamba2Config(n_heads=4, d_state=32, init="slow")


def attention_only(
    mixers: tuple[MixerConfig, ...], *, d_model: int, d_vocab: int, n_ctx: int, positions: str = "none"
) -> LanguageModelConfig:
    """A model without MLPs: RMSNorm, untied embeddings."""
    return LanguageModelConfig(
        d_model=d_model,
        n_layers=len(mixers),
        d_vocab=d_vocab,
        n_ctx=n_ctx,
        mixers=mixers,
        positions=positions,
        rope=RopeConfig() if positions == "rope" else None,
    )


def toy(
    description: str,
    data: DataConfig,
    *mixers: MixerConfig,
    d_model: int,
    steps: int,
    positions: str = "none",
    windows: tuple[tuple[int, int, int], ...] = (),
    batch: int = 64,
    lr: float = 3e-3,
    log_spaced: int = 8,
) -> ExperimentConfig:
    """A synthetic task for a CPU: AdamW 3e-3, betas .9/.95, decay .01, 50 warm-up steps, clip 1, batch 64."""
    return ExperimentConfig(
        description=description,
        model=attention_only(
            mixers, d_model=d_model, d_vocab=data.d_vocab, n_ctx=max(128, data.seq), positions=positions
        ),
        data=data,
        training=TrainingConfig(steps=steps, batch=batch, threads=1),
        optimiser=OptimiserConfig(lr=lr),
        checkpoints=CheckpointConfig(log_spaced=log_spaced, windows=windows),
        evaluation=EvalConfig(n_windows=64),
    )
