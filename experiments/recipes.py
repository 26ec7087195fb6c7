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
from experiments.data.config import DataConfig, PeriodicConfig, SegmentCopyConfig, TextConfig
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

PERIODIC = PeriodicConfig(seq=64, d_vocab=64, period_min=8, period_max=24)
PERIODIC_SMALL = PeriodicConfig(seq=48, d_vocab=32, period_min=8, period_max=16)
SEGMENT_COPY = SegmentCopyConfig(seq=64, d_vocab=64, segment_min=14, segment_max=24)


def attention_only(
    mixers: tuple[MixerConfig, ...],
    *,
    d_model: int,
    d_vocab: int,
    n_ctx: int,
    positions: str = "none",
    init_std: float = 0.02,
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
        init_std=init_std,
    )


def toy(
    description: str,
    data: DataConfig,
    *mixers: MixerConfig,
    steps: int,
    d_model: int = 64,
    positions: str | None = None,
    init_std: float = 0.02,
    lr: float = 3e-3,
    every: int = 25,
    windows: tuple[tuple[int, int, int], ...] | None = None,
) -> ExperimentConfig:
    """A synthetic task for one CPU thread: batch 64, decay .01, 50 warm-up steps, then a constant rate.

    Softmax models have RoPE unless `positions` says otherwise, the others no positions at all. Checkpoints
    are log-spaced at first, then every `every` steps.
    """
    if positions is None:
        positions = "rope" if any(m.kind == "softmax" for m in mixers) else "none"
    return ExperimentConfig(
        description=description,
        model=attention_only(
            mixers,
            d_model=d_model,
            d_vocab=data.d_vocab,
            n_ctx=max(128, data.seq),
            positions=positions,
            init_std=init_std,
        ),
        data=data,
        training=TrainingConfig(steps=steps, batch=64, threads=1),
        optimiser=OptimiserConfig(lr=lr),
        checkpoints=CheckpointConfig(log_spaced=6, windows=windows or ((every, steps, every),)),
        evaluation=EvalConfig(n_windows=64),
    )


def stdlib(
    description: str,
    *mixers: MixerConfig,
    steps: int,
    positions: str = "none",
    windows: tuple[tuple[int, int, int], ...] | None = None,
) -> ExperimentConfig:
    """The running Python's standard library for two CPU cores: BPE of 1,024 entries, context 128, batch 8."""
    return ExperimentConfig(
        description=description,
        model=attention_only(mixers, d_model=128, d_vocab=1024, n_ctx=256, positions=positions),
        data=TextConfig(seq=128, d_vocab=1024, max_bytes=16_000_000),
        training=TrainingConfig(steps=steps, batch=8, log_every=20),
        optimiser=OptimiserConfig(lr=3e-3, weight_decay=0.1, warmup_steps=100),
        checkpoints=CheckpointConfig(log_spaced=10, windows=windows or ((steps // 16, steps, steps // 16),)),
        evaluation=EvalConfig(n_windows=128, batch=32),
    )


def gpu_text(
    description: str,
    *mixers: MixerConfig,
    steps: int,
    positions: str = "none",
    d_model: int = 256,
    lr: float = 3e-3,
    windows: tuple[tuple[int, int, int], ...] = (),
) -> ExperimentConfig:
    """Any text on one GPU (`--set data.path=...`): BPE of 8,192 entries, context 512, batch 32.

    With a token file: `--set data.tokens=file --set data.path=NAME.bin.xz`.
    """
    return ExperimentConfig(
        description=description,
        model=attention_only(mixers, d_model=d_model, d_vocab=8192, n_ctx=512, positions=positions),
        data=TextConfig(seq=512, d_vocab=8192),
        training=TrainingConfig(steps=steps, batch=32, log_every=50),
        optimiser=OptimiserConfig(lr=lr, weight_decay=0.1, warmup_steps=200),
        checkpoints=CheckpointConfig(
            log_spaced=12, windows=windows or ((100, steps, 100),), training_state="last"
        ),
        evaluation=EvalConfig(n_windows=256, batch=32),
    )
