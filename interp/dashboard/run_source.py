"""A run folder as a source, without the checkpoints that are no such thing (half copied, damaged)."""

from dataclasses import replace
from pathlib import Path

from interp.dashboard.messages import attempt
from interp.sources import Source, open_source
from models.checkpoint import read_config
from models.errors import CheckpointError, ConfigError


def open_run(path: str) -> tuple[Source, dict[int, str]]:
    """What stands at a path; of a run folder the checkpoints that are whole, and why others are not, by step.

    Weights are not read here: a checkpoint of the source may still be damaged.

    Raises:
        DetectionError, CheckpointError, ConfigError: nothing at the path that can be read.
    """
    try:
        return open_source(path), {}
    except (CheckpointError, ConfigError):
        steps = _steps(Path(path))
        configs = {step: attempt(lambda folder=folder: read_config(folder)) for step, folder in steps.items()}
        refused = {step: why for step, (_, why) in configs.items() if why is not None}
        whole = [config for config, why in configs.values() if why is None]
        # All are whole, or of several models: then something else is wrong.
        if not whole or not refused or any(config != whole[0] for config in whole):
            raise
    parts = [open_source(folder) for step, folder in steps.items() if step not in refused]
    checkpoints = tuple(part.checkpoints[0] for part in parts)
    return replace(parts[0], path=path, checkpoints=checkpoints), refused


def _steps(folder: Path) -> dict[int, Path]:
    """Folders of a run by step, rising."""
    found = {int(one.name[5:]): one for one in folder.glob("step_*") if one.name[5:].isdecimal()}
    return {step: found[step] for step in sorted(found) if found[step].is_dir()}
