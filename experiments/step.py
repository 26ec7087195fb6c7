"""One update, eager, compiled or captured as a CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from experiments.clamping import clamped
from experiments.config import ExperimentConfig
from experiments.objective import autocast, model_losses
from experiments.optimiser import clip_gradients
from experiments.placement import Placement
from models.errors import ConfigError

# (tokens, weights) of this process's rows -> (its part of the loss in nats, the gradient's norm).
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def make_step(
    model: nn.Module, optimiser: torch.optim.Optimizer, config: ExperimentConfig, placement: Placement
) -> Step:
    """The update that `config.training` and `config.clamp` ask for. Weights sum to 1 over the global
    batch.
    """
    training, clip = config.training, config.optimiser.clip
    start, stop = placement.part(training.batch)
    if config.captures_step(placement.device.type, placement.n_processes):
        from experiments.cuda_graph import GraphedStep

        return GraphedStep(
            model,
            optimiser,
            batch=stop - start,
            seq=config.data.seq,
            device=placement.device,
            precision=training.precision,
            clip=clip,
        )
    return _eager_step(model, optimiser, config, placement)


def _eager_step(
    model: nn.Module, optimiser: torch.optim.Optimizer, config: ExperimentConfig, placement: Placement
) -> Step:
    training, clip, device = config.training, config.optimiser.clip, placement.device
    parallel = placement.parallel(model)
    forward = torch.compile(parallel) if training.compile else parallel
    if config.clamp is not None:
        if placement.n_processes > 1:
            raise ConfigError(f"clamp is given to {placement.n_processes} processes; accepted: one")
        forward = clamped(model, config.clamp)

    def backward(tokens: Tensor, weights: Tensor) -> Tensor:
        with autocast(device, training.precision):
            losses = model_losses(forward, tokens)
        loss = (losses * weights).sum()
        # DistributedDataParallel averages gradients; the weights already sum to 1 over all processes.
        (loss * placement.n_processes).backward()
        return loss.detach()

    def step(tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        tokens = tokens.to(device, non_blocking=True)
        weights = weights.to(device, non_blocking=True)
        optimiser.zero_grad(set_to_none=True)
        parts = list(
            zip(tokens.chunk(training.accumulation), weights.chunk(training.accumulation), strict=True)
        )
        loss = torch.zeros((), device=device)
        for part in parts[:-1]:
            with placement.without_sync(parallel):
                loss = loss + backward(*part)
        loss = loss + backward(*parts[-1])
        norm = clip_gradients(model, clip)
        optimiser.step()
        return loss, norm

    return step
