"""What run.json records: the whole configuration, the seeds, and what it was run with."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments.config import ExperimentConfig
from experiments.placement import Placement

_PACKAGES = ("beyond-softmax", "torch", "numpy", "transformer_lens", "accelerate", "tokenizers", "triton")


def run_record(name: str, config: ExperimentConfig, placement: Placement) -> dict[str, Any]:
    """The content of run.json, without its format number."""
    import torch

    cuda = placement.device.type == "cuda"
    return {
        "name": name,
        "config": config.to_dict(),
        "seeds": config.seeds.to_dict(),
        "versions": {"python": platform.python_version(), **_versions()},
        "git_commit": _git_commit(),
        "device": torch.cuda.get_device_name(placement.device) if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "processes": placement.n_processes,
        "cuda_graph": config.captures_step(placement.device.type, placement.n_processes),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git_commit() -> str | None:
    """The commit of the source tree, with `+` where tracked files differ from it; None outside a
    repository.
    """
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")
