"""Models by path or by their name on the Hugging Face hub."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.errors import CheckpointError
from models.pretrained.weights import pickled_files, pickled_only

# What a reader here opens: nothing else is downloaded.
WANTED = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "*.safetensors",
    "*.safetensors.index.json",
)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def from_pretrained(
    path_or_name: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Any:
    """A foreign model in our own mixers: every hook, reading and form of `LanguageModel`.

    Args:
        path_or_name: A Hugging Face folder, a `.gguf` file, or a name on the hub ("EleutherAI/pythia-70m").
        revision: Branch, tag or commit on the hub; for a local folder of revisions the name of one of them.
        dtype: In which the model computes. float16 and bfloat16 weights are read exactly; the default
            computes in float32.

    Returns:
        A LanguageModel in evaluation mode; `.tokenizer` is a `tokenizers.Tokenizer` or None, `.source` a
        `PretrainedSource`.

    Raises:
        UnsupportedArchitecture: no reader here for this kind of model.
        CheckpointError: nothing there, the hub cannot be reached, or files that cannot be read (pickled ones
            are refused).
        ConfigError: a configuration that is not accepted.
    """
    from models.pretrained.load import load_opened, open_pretrained

    name = str(path_or_name)
    folder = local(path_or_name, revision)
    if folder is None:
        folder = Path(download(name, revision))
    else:
        name = str(folder)
    return load_opened(open_pretrained(folder), dtype=dtype, device=device, name=name, revision=revision)


def local(path_or_name: str | Path, revision: str | None = None) -> Path | None:
    """The path that is meant, or None for a name on the hub.

    Raises:
        CheckpointError: neither a path that exists nor a name that the hub could have.
    """
    path = Path(path_or_name).expanduser()
    if path.exists():
        if revision is None:
            return path
        if (path / revision).is_dir():
            return path / revision
        raise CheckpointError(
            f"{path} has no revision {revision!r}: a local folder of revisions has one folder for each"
        )
    text = str(path_or_name)
    looks_local = text.startswith((".", "/", "~")) or text.endswith((".gguf", "/")) or text.count("/") > 1
    if isinstance(path_or_name, Path) or looks_local or not _NAME.fullmatch(text):
        raise CheckpointError(f"{path_or_name} does not exist")
    return None


def is_pretrained(path: str | Path) -> bool:
    """Whether a path is a `.gguf` file or a Hugging Face folder (config.json of our own has a "format")."""
    from models.pretrained.keys import read_json

    path = Path(path)
    if path.is_file():
        return path.suffix == ".gguf"
    return (path / "config.json").is_file() and "format" not in read_json(path / "config.json")


@dataclass(frozen=True)
class HubFiles:
    """The files of one revision: names, and one text that two revisions with equal weight files share."""

    names: tuple[str, ...]
    fingerprint: str | None


def hub_files(name: str, revision: str | None) -> HubFiles:
    """What a revision on the hub holds, without downloading it. Raises CheckpointError as `download`."""
    with _one_line(name, revision):
        info = _api().model_info(name, revision=revision, files_metadata=True)
    names = tuple(sibling.rfilename for sibling in info.siblings)
    hashes = [
        _sha(s)
        for s in sorted(info.siblings, key=lambda s: s.rfilename)
        if s.rfilename.endswith(".safetensors")
    ]
    return HubFiles(names, " ".join(hashes) if hashes and all(hashes) else None)


def download(name: str, revision: str | None, *, folder: Path | None = None) -> str:
    """Fetch what a reader needs of one revision: to the hub's cache, or into `folder` alone.

    Raises:
        CheckpointError: no network, no such model or revision, not allowed, or pickled weights only (nothing
            is fetched).
    """
    try:
        names = hub_files(name, revision).names
    except CheckpointError:
        cached = None if folder else _cached(name, revision)
        if cached is None:
            raise
        return cached
    refuse_pickled(name, revision, names)
    with _one_line(name, revision):
        return _api().snapshot_download(
            name, revision=revision, allow_patterns=list(WANTED), local_dir=folder
        )


def refuse_pickled(name: str, revision: str | None, names: tuple[str, ...]) -> None:
    """Raises CheckpointError where a revision has weights in pickled form only."""
    if not any(file.endswith(".safetensors") for file in names) and pickled_files(names):
        raise pickled_only(_at(name, revision), names)


def branches(name: str) -> list[str]:
    """The names of all branches and tags of a model on the hub."""
    with _one_line(name, None):
        refs = _api().list_repo_refs(name)
    return [ref.name for ref in (*refs.branches, *refs.tags)]


def _cached(name: str, revision: str | None) -> str | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return snapshot_download(name, revision=revision, allow_patterns=list(WANTED), local_files_only=True)
    except (OSError, ValueError, HfHubHTTPError):
        return None


def _api() -> Any:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def _sha(sibling: Any) -> str | None:
    lfs = getattr(sibling, "lfs", None)
    return getattr(lfs, "sha256", None) or getattr(sibling, "blob_id", None)


def _at(name: str, revision: str | None) -> str:
    return name if revision is None else f"{name} at revision {revision!r}"


@contextmanager
def _one_line(name: str, revision: str | None) -> Iterator[None]:
    """The hub's many errors as one CheckpointError with one line."""
    from huggingface_hub import errors

    at = _at(name, revision)
    try:
        yield
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{at}: access on the hub is restricted; ask for it there and log in first"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{name} has no revision {revision!r} on the hub") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(f"{name!r} is neither a local path nor a model on the hub") from None
    except errors.HFValidationError:
        raise CheckpointError(
            f"{name!r} is neither a local path nor a name that the hub could have"
        ) from None
    except CheckpointError:
        raise
    # Network errors come from the HTTP library that huggingface_hub was built with.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{name!r} is no local path, and the hub cannot be reached ({reason}); give a folder or a .gguf "
            f"file"
        ) from None
