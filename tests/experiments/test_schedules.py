"""Learning rates and checkpoint steps, by hand."""

import pytest

from experiments.config import CheckpointConfig, OptimiserConfig
from experiments.schedule import checkpoint_steps, learning_rate
from models.errors import ConfigError


def test_warm_up_then_constant():
    config = OptimiserConfig(lr=1.0, warmup_steps=4, schedule="constant")
    assert [learning_rate(s, 10, config) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(0, 10, config.replace(warmup_steps=0)) == 1.0


def test_cosine_ends_at_its_floor():
    config = OptimiserConfig(lr=2.0, warmup_steps=10, schedule="cosine", final_lr_fraction=0.1)
    assert learning_rate(10, 111, config) == pytest.approx(2.0)
    assert learning_rate(60, 111, config) == pytest.approx(1.1)
    assert learning_rate(110, 111, config) == pytest.approx(0.2)
    rates = [learning_rate(s, 111, config) for s in range(10, 111)]
    assert all(a > b for a, b in zip(rates, rates[1:], strict=False))


def test_checkpoint_steps():
    assert checkpoint_steps(1000, CheckpointConfig(log_spaced=3)) == (0, 1, 10, 100, 1000)
    windows = CheckpointConfig(log_spaced=0, windows=((20, 40, 10), (90, 200, 5)))
    assert checkpoint_steps(100, windows) == (0, 20, 30, 40, 90, 95, 100)
    assert checkpoint_steps(5, CheckpointConfig(log_spaced=50)) == (0, 1, 2, 3, 4, 5)
    with pytest.raises(ConfigError, match=r"\[30, 20, 1\]"):
        CheckpointConfig(windows=((30, 20, 1),))
