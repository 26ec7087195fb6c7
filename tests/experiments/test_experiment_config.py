"""Configurations of experiments: round trip, settings by dotted key, the named runs."""

import json

import pytest
from small_runs import small_run

from experiments.config import ExperimentConfig, differing_keys, with_settings
from experiments.runs import find_run, load_run, run_names
from models.errors import ConfigError


def test_every_named_run_is_whole():
    names = run_names()
    for part in ("softmax", "linear", "mamba1", "mamba2"):
        assert {f"periodic-{part}", f"copy-{part}", f"demo-{part}"} <= set(names)
    assert {"stdlib-softmax", "stdlib-linear", "stdlib-mamba2", "copy-softmax-1l", "iid-softmax"} <= set(
        names
    )
    for name in names:
        config = load_run(name)
        assert config.description and "\n" not in config.description, name
        plain = json.loads(json.dumps(config.to_dict()))
        assert ExperimentConfig.from_dict(plain) == config, name


def test_settings_by_dotted_key():
    config = with_settings(
        small_run(),
        [
            "optimiser.lr=0.5",
            "training.steps=7",
            "model.mixers.0.n_heads=4",
            "training.threads=null",
            "data.kind=periodic",
            "checkpoints.windows=[[0, 5, 1]]",
        ],
    )
    assert config.optimiser.lr == 0.5 and config.training.steps == 7 and config.training.threads is None
    assert config.model.mixers[0].n_heads == 4 and config.checkpoints.windows == ((0, 5, 1),)
    assert small_run().optimiser.lr == 3e-3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimizer.lr=1", "no setting 'optimizer.lr'; did you mean optimiser.lr"),
        ("lr=1", "no setting 'lr'; did you mean optimiser.lr?"),
        ("optimiser.lr", "has no '='"),
        ("optimiser.lr=fast", "lr is 'fast'"),
        ("optimiser.lr=-1", "a positive number"),
        ("training.batch=2.5", "batch is 2.5"),
        ("model.n_layers=2", "one for each of the n_layers = 2"),
        ("data.d_vocab=99", "at most model.d_vocab = 16"),
    ],
)
def test_bad_settings_are_refused(setting, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        with_settings(small_run(), [setting])


def test_differing_keys_are_named():
    a, b = small_run(), with_settings(small_run(), ["optimiser.lr=0.5", "seeds.init=3"])
    assert differing_keys(a.to_dict(), a.to_dict()) == []
    assert differing_keys(a.to_dict(), b.to_dict()) == ["optimiser.lr: 0.003 -> 0.5", "seeds.init: 0 -> 3"]


def test_runs_from_files(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"format": 1, "config": small_run().to_dict()}))
    assert find_run(str(path)) == ("mine", small_run())
    path.write_text(json.dumps(small_run().to_dict()))
    assert find_run(str(path)) == ("mine", small_run())
    script = tmp_path / "my_run.py"
    script.write_text("from experiments.runs import load_run\nCONFIG = load_run('iid-softmax')\n")
    assert find_run(str(script)) == ("my-run", load_run("iid-softmax"))
    for content, message in (("x = 1", "holds no CONFIG"), ("1/0", "ZeroDivisionError")):
        script.write_text(content)
        with pytest.raises(ConfigError, match=message):
            find_run(str(script))
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is not JSON"):
            find_run(str(path))
    with pytest.raises(ConfigError, match="no run named 'copy-softmx'; did you mean copy-softmax"):
        find_run("copy-softmx")
