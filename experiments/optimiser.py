"""AdamW with two parameter groups, and its state as plain tensors."""

import math

import torch
from torch import nn

from experiments.config import OptimiserConfig
from models.errors import CheckpointError

# Parameters that weight decay would pull away from the dynamics they set.
_NEVER_DECAYED = {"A_log", "D", "dt_bias", "b_dt"}
_STATE = ("step", "exp_avg", "exp_avg_sq")


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay acts: on matrices, never on norms, biases, A_log, D or anything of dt."""
    parts = name.split(".")
    last = parts[-1]
    if parameter.ndim < 2 or last in _NEVER_DECAYED or last == "bias" or last.startswith("b_"):
        return False
    return not any("norm" in part or part.startswith(("ln", "dt_")) for part in parts)


def build_optimiser(
    model: nn.Module, config: OptimiserConfig, device: torch.device, *, capturable: bool = False
) -> torch.optim.AdamW:
    """AdamW over the model's parameters; on CUDA the rate is a tensor, so that a captured step can follow a
    schedule.
    """
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        (decayed if is_decayed(name, parameter) else free).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    cuda = device.type == "cuda"
    lr = torch.tensor(config.lr, device=device) if cuda else config.lr
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
        capturable=capturable,
    )


def set_learning_rate(optimiser: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every group, in place where it is a tensor."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def clip_gradients(model: nn.Module, clip: float) -> torch.Tensor:
    """Scale the gradients to a total norm of at most `clip` (0: leave them); returns the norm before, a
    scalar.
    """
    return nn.utils.clip_grad_norm_(model.parameters(), clip if clip else math.inf)


def state_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's state, named `exp_avg.<parameter>` and so on, on the CPU."""
    tensors = {}
    for name, parameter in model.named_parameters():
        state = optimiser.state.get(parameter, {})
        for key in _STATE:
            if key in state:
                tensors[f"{key}.{name}"] = state[key].detach().cpu().clone()
    return tensors


def load_state_tensors(
    model: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    """Put back what `state_tensors` gave; no tensors at all is the state before the first update.

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape or dtype, or holds numbers that no
            update leaves (NaN, infinite, a negative second moment).
    """
    if not tensors:
        return
    expected = {f"{key}.{name}": (key, p) for name, p in model.named_parameters() for key in _STATE}
    if expected.keys() != tensors.keys():
        odd = sorted(expected.keys() ^ tensors.keys())
        raise CheckpointError(f"the optimiser's state does not fit the model: {', '.join(odd[:3])}")
    on_device = any(group["capturable"] or group["fused"] for group in optimiser.param_groups)
    for name, (key, parameter) in expected.items():
        value = tensors[name]
        _check_state(name, value, parameter, is_step=key == "step")
        if key != "step" or on_device:
            value = value.to(parameter.device)
        optimiser.state[parameter][key] = value.clone()


def _check_state(name: str, value: torch.Tensor, parameter: nn.Parameter, *, is_step: bool) -> None:
    shape, dtype = (torch.Size(), torch.float32) if is_step else (parameter.shape, parameter.dtype)
    of = "accepted is" if is_step else "the model's is"
    if value.shape != shape:
        raise CheckpointError(f"the optimiser's {name} has shape {tuple(value.shape)}, {of} {tuple(shape)}")
    if value.dtype != dtype:
        raise CheckpointError(f"the optimiser's {name} has dtype {value.dtype}, {of} {dtype}")
    low, high = (float(end) for end in torch.aminmax(value)) if value.numel() else (0.0, 0.0)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise CheckpointError(f"the optimiser's {name} holds NaN or infinite values; accepted: finite ones")
    if low < 0 and not name.startswith("exp_avg."):
        raise CheckpointError(f"the optimiser's {name} holds {low:g}; accepted: 0 or more")
