"""Tiny experiments that train in about a second; shared by the tests of `experiments`."""

from experiments.config import (
    CheckpointConfig,
    EvalConfig,
    ExperimentConfig,
    OptimiserConfig,
    TrainingConfig,
)
from experiments.data.config import DataConfig, PeriodicConfig
from models.config import LanguageModelConfig, SoftmaxAttentionConfig


def small_run(
    data: DataConfig | None = None, *, steps: int = 40, every: int = 10, **training
) -> ExperimentConfig:
    """One softmax layer of width 16 on periodic data, a checkpoint every `every` steps."""
    data = data or PeriodicConfig(seq=16, d_vocab=16, period_min=3, period_max=6)
    return ExperimentConfig(
        description="tiny",
        model=LanguageModelConfig(
            d_model=16,
            n_layers=1,
            d_vocab=data.d_vocab,
            n_ctx=max(16, data.seq),
            mixers=(SoftmaxAttentionConfig(n_heads=2),),
            positions="learned",
        ),
        data=data,
        training=TrainingConfig(**{"steps": steps, "batch": 8, "threads": 1, "log_every": 5, **training}),
        optimiser=OptimiserConfig(warmup_steps=5),
        checkpoints=CheckpointConfig(log_spaced=0, windows=((0, steps, every),)),
        evaluation=EvalConfig(n_windows=8, batch=4),
    )
