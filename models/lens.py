"""The one place where TransformerLens's base classes come in.

A machine that only trains may lack transformer_lens, and a command may do without it (`models.without_lens`).
There the two base classes below stand in: identity hook points without hooks. Models train, generate and are
saved as ever, while everything that needs a hook is refused.
"""

import importlib.util

from torch import Tensor, nn

import models
from models.errors import ConfigError

HAS_LENS = models.LENS and importlib.util.find_spec("transformer_lens") is not None

if HAS_LENS:
    from transformer_lens import HookedRootModule
    from transformer_lens.hook_points import HookPoint
else:

    class HookPoint(nn.Module):
        """The identity, without hooks."""

        def __init__(self):
            super().__init__()
            self.name: str | None = None
            self.pos_dim: int | None = None
            self.ctx: dict = {}

        def forward(self, x: Tensor) -> Tensor:
            return x

    class HookedRootModule(nn.Module):
        """A root module that knows the names of its points but cannot hook them."""

        def __init__(self):
            super().__init__()
            self.context_level = 0

        def setup(self) -> None:
            self.hook_dict = {}
            for name, module in self.named_modules():
                if isinstance(module, HookPoint):
                    module.name = name
                    self.hook_dict[name] = module


def require_lens() -> None:
    """Raises ConfigError where transformer_lens is not installed or not used."""
    if not HAS_LENS:
        why = "is not installed here" if models.LENS else "this command does without"
        raise ConfigError(f"hooks and caches need transformer_lens, which {why}")


def attached(*points: nn.Module) -> bool:
    """Whether any of these points or modules has a hook, of PyTorch's or TransformerLens's, so that what it
    shows must be computed on its own."""
    return any(
        point._forward_hooks
        or point._forward_pre_hooks
        or point._backward_hooks
        or point._backward_pre_hooks
        for point in points
    )
