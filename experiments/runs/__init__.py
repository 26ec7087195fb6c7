"""Named runs: one file a run, holding a CONFIG. `periodic_softmax.py` is the run `periodic-softmax`.

A run of one's own is a file of the same form anywhere: `train-lm my_run.py --out DIR`.
"""

import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

from experiments.config import ExperimentConfig
from models.errors import ConfigError, closest

_FOLDER = Path(__file__).parent
_IMPORT = (
    "accepted: CONFIG = ExperimentConfig(...), with `from experiments.config import ExperimentConfig` "
    "(README.md has an example)"
)


def run_names() -> list[str]:
    """All named runs, sorted."""
    return sorted(p.stem.replace("_", "-") for p in _FOLDER.glob("*.py") if p.stem != "__init__")


def load_run(name: str) -> ExperimentConfig:
    """The configuration of a named run.

    Raises:
        ConfigError: no run has this name (with the closest matches), or its file holds no CONFIG.
    """
    if name not in run_names():
        raise ConfigError(f"no run named {name!r}{closest(name, run_names())} (train-lm --list shows all)")
    module = importlib.import_module(f"experiments.runs.{name.replace('-', '_')}")
    return _config_of(module, f"the run {name!r}")


def find_run(run: str) -> tuple[str, ExperimentConfig]:
    """Name and configuration of a named run, a `.py` file holding CONFIG, or a `.json` file.

    A `.json` file is a configuration, or a whole run.json.

    Raises:
        ConfigError: nothing there, or not a configuration.
    """
    path = Path(run)
    if path.suffix not in (".py", ".json"):
        return run, load_run(run)
    if not path.is_file():
        raise ConfigError(f"no file {run!r}")
    return path.stem.replace("_", "-"), _from_python(path) if path.suffix == ".py" else _from_json(path)


def begun_run(out: Path) -> tuple[str, ExperimentConfig]:
    """Name and configuration of the run that was begun in a folder, as its run.json has them.

    Raises:
        ConfigError: no run.json, or one that cannot be read.
    """
    path = out / "run.json"
    if not path.is_file():
        raise ConfigError(f"{out} holds no run.json, so there is nothing to resume; give RUN to begin one")
    config = _from_json(path)
    return str(json.loads(path.read_text("utf-8")).get("name") or path.parent.name), config


def _from_python(path: Path) -> ExperimentConfig:
    spec = importlib.util.spec_from_file_location(f"_run_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{path} does not run: {type(error).__name__}: {said}; {_IMPORT}") from error
    return _config_of(module, str(path))


def _config_of(module: ModuleType, where: str) -> ExperimentConfig:
    config = getattr(module, "CONFIG", None)
    if not isinstance(config, ExperimentConfig):
        found = "no CONFIG" if config is None else f"a CONFIG that is a {type(config).__name__}"
        raise ConfigError(f"{where} holds {found}; {_IMPORT}")
    return config


def _from_json(path: Path) -> ExperimentConfig:
    try:
        values = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if isinstance(values, dict) and isinstance(values.get("config"), dict):
        values = values["config"]
    return ExperimentConfig.from_dict(values)
