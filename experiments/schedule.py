"""Two schedules: the learning rate of a step, and the steps that are saved."""

import math

from experiments.config import CheckpointConfig, OptimiserConfig


def learning_rate(step: int, total_steps: int, config: OptimiserConfig) -> float:
    """Rate of the update that makes step `step` + 1: linear warm-up, then constant or cosine.

    The first update already has a rate above zero: lr / warmup_steps. The cosine ends at final_lr_fraction *
    lr with the last update.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, total_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    low = config.final_lr_fraction
    return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


def checkpoint_steps(total_steps: int, config: CheckpointConfig) -> tuple[int, ...]:
    """Steps to save, rising: 0, the last, `log_spaced` geometrically spaced steps, and the dense windows.

    Log-spaced steps run from 1 to the last; duplicates after rounding are saved once. Windows are cut at the
    last step.
    """
    steps = {0, total_steps}
    for n in range(config.log_spaced):
        steps.add(round(total_steps ** (n / config.log_spaced)))
    for start, stop, every in config.windows:
        steps.update(range(start, min(stop, total_steps) + 1, every))
    return tuple(sorted(steps))
