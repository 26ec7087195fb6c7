"""A whole training step (forward, backward, clipping, AdamW) captured once as a CUDA graph and replayed.

Small models are bound by the launch of their many small kernels; a graph launches them all at once.
"""

import torch
from torch import nn

from experiments.objective import autocast, model_losses
from experiments.optimiser import clip_gradients

# PyTorch asks for a few eager runs on a side stream before a capture.
_WARM_UP = 3


class GraphedStep:
    """`step(tokens, weights)` makes one update, with the same arithmetic as the eager step.

    The learning rate must be a tensor in the optimiser's groups, and the optimiser capturable. Shapes are
    fixed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        *,
        batch: int,
        seq: int,
        device: torch.device,
        precision: str,
        clip: float,
    ):
        self._model, self._optimiser = model, optimiser
        self._precision, self._clip, self._device = precision, clip, device
        self._tokens = torch.zeros(batch, seq, dtype=torch.int64, device=device)
        self._weights = torch.full((batch, seq - 1), 1 / (batch * (seq - 1)), device=device)
        self._graph = torch.cuda.CUDAGraph()
        self._warm_up()
        self._optimiser.zero_grad(set_to_none=True)
        with torch.cuda.graph(self._graph):
            self._loss, self._norm = self._body()

    def __call__(self, tokens: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One update; returns the loss before it and the gradient's norm, both overwritten by the next
        call.
        """
        self._tokens.copy_(tokens, non_blocking=True)
        self._weights.copy_(weights, non_blocking=True)
        self._graph.replay()
        return self._loss, self._norm

    def _body(self) -> tuple[torch.Tensor, torch.Tensor]:
        # Casts cached outside the graph would be stale in a replay.
        with autocast(self._device, self._precision, cached=False):
            losses = model_losses(self._model, self._tokens)
        loss = (losses * self._weights).sum()
        loss.backward()
        norm = clip_gradients(self._model, self._clip)
        self._optimiser.step()
        return loss.detach(), norm.detach()

    def _warm_up(self) -> None:
        """Run the step eagerly, then put weights and optimiser state back to what they were."""
        parameters = list(self._model.parameters())
        weights = [p.detach().clone() for p in parameters]
        before = {
            (p, key): value.clone()
            for p in parameters
            for key, value in self._optimiser.state.get(p, {}).items()
        }
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._optimiser.zero_grad(set_to_none=True)
                self._body()
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad():
            for p, kept in zip(parameters, weights, strict=True):
                p.copy_(kept)
                for key, value in self._optimiser.state[p].items():
                    # State that did not exist before the first update began at zero.
                    value.copy_(before[p, key]) if (p, key) in before else value.zero_()
