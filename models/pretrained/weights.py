"""Named tensors on disk: shape and dtype at once, values on demand, one tensor at a time."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.errors import CheckpointError

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
INDEX = ".safetensors.index.json"
# Names of dtypes in safetensors headers that can be weights.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        shape: Shape as torch counts it (slowest axis first).
        dtype: As stored: "float32", "bfloat16", or a GGUF quantisation such as "Q4_1".
        raw: The stored values, for hashing (quantised blocks as bytes).
        load: The values; quantised ones in float32.
    """

    shape: tuple[int, ...]
    dtype: str
    raw: Callable[[], Tensor]
    load: Callable[[], Tensor]


Weights = Mapping[str, StoredTensor]


def open_safetensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's `model.safetensors`, or of all shards that its index names.

    Raises:
        CheckpointError: no weights; only pickled ones, which are never loaded; a shard that is missing,
            unreadable or lacks a tensor that the index places in it; a dtype that cannot be a weight.
    """
    found: dict[str, StoredTensor] = {}
    placed = _shards(folder)
    for file in dict.fromkeys(placed.values()) if placed else [_single(folder)]:
        path = folder / file
        if not path.is_file():
            shards = len(set(placed.values()))
            raise CheckpointError(f"{folder}: shard {file!r} is missing; the index names {shards} shards")
        found |= _tensors(path)
    for name, file in placed.items():
        if name not in found:
            raise CheckpointError(
                f"{folder}: the index places tensor {name!r} in {file!r}, which does not hold it"
            )
    return found


def sha256(weights: Weights) -> str:
    """Hash of names, dtypes, shapes and values as stored: the same however the weights are sharded."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(tensor.raw().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def dtypes(weights: Weights) -> str:
    """The dtypes of the stored weights, the one with the most numbers first: "bfloat16", "Q4_1 + float32"."""
    sizes: dict[str, int] = {}
    for tensor in weights.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + torch.Size(tensor.shape).numel()
    return " + ".join(sorted(sizes, key=lambda name: -sizes[name]))


def pickled_files(names: Iterable[str]) -> list[str]:
    """Those names that look like pickled weights."""
    return sorted(name for name in names if name.endswith(PICKLED))


def pickled_only(where: str, names: Iterable[str]) -> CheckpointError:
    """The error for a place that has weights in pickled form only."""
    return CheckpointError(
        f"{where}: the weights are pickled ({', '.join(pickled_files(names)[:3])}), which is refused "
        f"because unpickling "
        "can run code from the file; save them as safetensors"
    )


def _shards(folder: Path) -> dict[str, str]:
    """Tensor name -> file, from the index; empty where there is none."""
    index = sorted(folder.glob("*" + INDEX))
    if not index or (folder / "model.safetensors").is_file():
        return {}
    try:
        placed = json.loads(index[0].read_text("utf-8"))["weight_map"]
        # A shard is a file of this folder: no path that leads out of it.
        valid = all(isinstance(file, str) and Path(file).name == file for file in placed.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise CheckpointError(
            f"{index[0]}: not an index of shards (accepted: JSON with weight_map: tensor -> file)"
        )
    return placed


def _single(folder: Path) -> str:
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in files:
        return "model.safetensors"
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(
            f"{folder}: {len(files)} safetensors files without an index: {', '.join(files[:3])}, ..."
        )
    names = [path.name for path in folder.iterdir()]
    if pickled_files(names):
        raise pickled_only(str(folder), names)
    raise CheckpointError(f"{folder}: no weights; accepted: model.safetensors, or shards with model{INDEX}")


def _tensors(path: Path) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt")
        headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    found = {}
    for name, header in headers.items():
        dtype = DTYPES.get(header.get_dtype(), header.get_dtype().lower())
        read = _reader(file, name)
        found[name] = StoredTensor(shape=tuple(header.get_shape()), dtype=dtype, raw=read, load=read)
    return found


def _reader(file, name: str) -> Callable[[], Tensor]:
    return lambda: file.get_tensor(name)
