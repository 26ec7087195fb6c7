"""Checkpoints on disk: one folder with model.safetensors and config.json, written whole or not at all.

Nothing is pickled and nothing pickled is ever loaded. `config.json` holds the configuration and `"format":
1`.
"""

import itertools
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from models.config import LanguageModelConfig
from models.disk import written_folder
from models.errors import CheckpointError, ConfigError, closest

FORMAT = 1
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def save_model(
    folder: str | Path,
    model: nn.Module,
    *,
    extra_files: Mapping[str, str | bytes | Mapping[str, Tensor]] | None = None,
) -> Path:
    """Write a checkpoint folder; an earlier one of the same name is replaced in one step.

    Everything goes to a temporary sibling folder, is flushed to the disk, and is renamed. When anything
    fails, what was there stays as it was and nothing temporary is left.

    Args:
        model: A LanguageModel, bare or wrapped by torch.compile or DistributedDataParallel. Its tokenizer
            goes along as tokenizer.json where it can be written as one.
        extra_files: File name -> text, bytes, or tensors (a .safetensors file).

    Returns:
        The folder.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written.
        ConfigError: an extra file would replace one of the checkpoint's own.
    """
    folder = Path(folder)
    model = unwrapped(model)
    files: dict[str, Any] = {
        "model.safetensors": model_tensors(model),
        "config.json": json.dumps({"format": FORMAT, **model.config.to_dict()}, indent=1, allow_nan=False)
        + "\n",
    }
    tokenizer = getattr(model.tokenizer, "backend_tokenizer", model.tokenizer)
    if hasattr(tokenizer, "to_str"):
        files["tokenizer.json"] = tokenizer.to_str()
    for name, content in (extra_files or {}).items():
        if name in ("model.safetensors", "config.json") or Path(name).name != name:
            raise ConfigError(
                f"extra file {name!r} is not accepted: a plain name, not one of the checkpoint's own"
            )
        files[name] = content
    with written_folder(folder) as temporary:
        for name, content in files.items():
            _write(temporary / name, content)
    return folder


def load_model(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> "LanguageModel":  # noqa: F821
    """The model of a checkpoint folder, in evaluation mode, with its tokenizer if one is there.

    Args:
        dtype: Of the weights in memory; None keeps the stored one (float32 if they are mixed).

    Raises:
        CheckpointError: no such folder or nothing in it; a damaged, truncated or pickled file; tensors that
            are missing, unexpected, of another shape than config.json says, or not finite.
        ConfigError: config.json has another format number, an unknown key or a value that is not accepted.
    """
    from models.language_model import LanguageModel

    folder = Path(folder)
    config = read_config(folder)
    tensors = read_tensors(folder / "model.safetensors")
    model = LanguageModel(config, tokenizer=_read_tokenizer(folder / "tokenizer.json"))
    _check_tensors(folder / "model.safetensors", tensors, model.state_dict())
    dtypes = Counter(t.dtype for t in tensors.values())
    model.to(dtype or (next(iter(dtypes)) if len(dtypes) == 1 else torch.float32))
    model.load_state_dict(tensors)
    model.folder = folder.resolve()
    return model.to(device).eval()


def load_weights(folder: str | Path, model: nn.Module) -> None:
    """Replace a model's weights by those of another checkpoint of the same configuration, in place.

    Quicker than `load_model` on a series, where only the weights differ. The model keeps its device, its
    dtype
    and its tokenizer; on an error it keeps its weights too.

    Raises:
        CheckpointError: as `load_model`; or a checkpoint of another configuration.
    """
    model.load_state_dict(read_weights(folder, model))
    model.folder = Path(folder).resolve()


def read_weights(folder: str | Path, model: nn.Module) -> dict[str, Tensor]:
    """The weights of a checkpoint on the CPU, checked to be ones that `load_state_dict` of this model takes.

    Raises:
        CheckpointError, ConfigError: as `load_weights`.
    """
    folder = Path(folder)
    if read_config(folder) != model.config:
        raise CheckpointError(f"{folder} has another configuration than the model that its weights are for")
    tensors = read_tensors(folder / "model.safetensors")
    _check_tensors(folder / "model.safetensors", tensors, model.state_dict())
    return tensors


def read_config(folder: str | Path) -> LanguageModelConfig:
    """The configuration of a checkpoint folder; errors as `load_model`."""
    folder = Path(folder)
    _check_folder(folder)
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {_one_line(error)}") from None
    if not isinstance(values, dict) or "format" not in values:
        hint = ""
        if isinstance(values, dict) and "model_type" in values:
            hint = (
                f" (it describes a Hugging Face model of type {values['model_type']!r}, "
                "which models.pretrained.from_pretrained reads)"
            )
        raise ConfigError(f'{path} has no "format" number: not a checkpoint written by this project{hint}')
    number = values.pop("format")
    if number != FORMAT:
        raise ConfigError(f"{path} has format {number!r}; accepted: format {FORMAT}")
    try:
        return LanguageModelConfig.from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def list_checkpoints(run_folder: str | Path) -> list[tuple[int, Path]]:
    """The checkpoints `step_<number>` of a run folder as (step, path), by step.

    Raises:
        CheckpointError: no such folder, no checkpoint in it, a step folder that is not one, two folders of
            one step, or checkpoints of two different models (the message names one of each and what differs).
        ConfigError: as `load_model`.
    """
    run_folder = Path(run_folder)
    if not run_folder.is_dir():
        raise CheckpointError(f"{run_folder} does not exist or is not a folder")
    steps = [(int(p.name[5:]), p) for p in run_folder.glob("step_*") if p.is_dir() and p.name[5:].isdecimal()]
    if not steps:
        raise CheckpointError(f"{run_folder} holds no checkpoint (no folder step_<number>)")
    steps.sort()
    for (step, path), (later, other) in itertools.pairwise(steps):
        if step == later:
            raise CheckpointError(
                f"{run_folder} has two folders of step {step}: {path.name} and {other.name}; accepted: one"
            )
    first = read_config(steps[0][1])
    for _, path in steps[1:]:
        config = read_config(path)
        if config != first:
            a, b = first.to_dict(), config.to_dict()
            key = next(k for k in a if a[k] != b[k])
            raise CheckpointError(
                f"{run_folder} mixes two models: {steps[0][1].name} has {key} = {a[key]!r}, "
                f"{path.name} has {key} = {b[key]!r}"
            )
    return steps


def unwrapped(model: nn.Module) -> nn.Module:
    """The LanguageModel inside wrappers of torch.compile, DistributedDataParallel or accelerate.

    Raises:
        ConfigError: there is none.
    """
    while (
        not hasattr(model, "config")
        or hasattr(model, "_orig_mod")
        or type(model).__name__.endswith("Parallel")
    ):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None:
            raise ConfigError(f"a {type(model).__name__} is not a LanguageModel and wraps none")
        model = inner
    return model


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's weights on the CPU under plain names, without what torch.compile or DDP put in front."""
    tensors = {}
    for name, value in model.state_dict().items():
        plain = ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))
        tensors[plain] = value.detach().to("cpu").contiguous()
    return tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        CheckpointError: no such file, or it is damaged or truncated.
    """
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged, truncated or unreadable: {_one_line(error)}") from None


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; accepted: a checkpoint folder")
    names = sorted(p.name for p in folder.iterdir())
    if not names:
        raise CheckpointError(f"{folder} is empty: no checkpoint in it")
    pickled = [n for n in names if n.endswith(PICKLED)]
    if "model.safetensors" not in names and pickled:
        raise CheckpointError(
            f"{folder} has only pickled weights ({pickled[0]}), which are never loaded: "
            "save them as model.safetensors"
        )
    steps = [name for name in names if name.startswith("step_")]
    if "config.json" not in names and steps:
        raise CheckpointError(
            f"{folder} is a run, not one checkpoint; accepted: a folder in it, like {folder / steps[-1]} "
            "(list_checkpoints gives all)"
        )
    for name in ("config.json", "model.safetensors"):
        if name not in names:
            raise CheckpointError(f"{folder} holds no checkpoint: {name} is missing")


def _check_tensors(path: Path, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Refuses weights that are not exactly those of the model, or not finite."""
    missing = [n for n in expected if n not in tensors]
    if missing:
        raise CheckpointError(f"{path} lacks the tensor {missing[0]!r}" + _more(missing))
    unexpected = [n for n in tensors if n not in expected]
    if unexpected:
        raise CheckpointError(
            f"{path} has an unexpected tensor {unexpected[0]!r}{_more(unexpected)}"
            f"{closest(unexpected[0], expected)}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {list(tensor.shape)}, "
                f"but config.json makes it {list(expected[name].shape)}"
            )
        if tensor.is_floating_point() != expected[name].is_floating_point():
            raise CheckpointError(
                f"{path}: tensor {name!r} has dtype {tensor.dtype}; accepted: a floating-point one"
            )
        if tensor.numel() and not all(torch.isfinite(end) for end in torch.aminmax(tensor)):
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(
                f"{path}: tensor {name!r} has {bad} NaN or infinite values of {tensor.numel()}"
            )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _read_tokenizer(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    try:
        return Tokenizer.from_file(str(path))
    # The tokenizers library raises plain Exception.
    except Exception as error:
        raise CheckpointError(f"{path} is not a tokenizer: {_one_line(error)}") from None


def _write(path: Path, content: Any) -> None:
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        tensors = {name: t.detach().to("cpu").contiguous() for name, t in content.items()}
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
