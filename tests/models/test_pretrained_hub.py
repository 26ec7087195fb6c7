"""Models and series on the hub, through huggingface_hub's client, against a server on this machine."""

import shutil
import tempfile
from pathlib import Path

import hf_models
import pytest
import torch
from hub_server import hub_server

from interp import detect
from models.errors import CheckpointError
from models.pretrained import from_pretrained, open_series

NAME = "someone/pythia-tiny"


@pytest.fixture(scope="module")
def revisions(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "revisions"
    model = hf_models.gpt_neox()
    for branch in ("step0", "step1", "step4", "main"):
        if branch not in ("step1",):
            with torch.no_grad():
                model.gpt_neox.layers[0].attention.query_key_value.weight.mul_(0.9)
        model.save_pretrained(folder / branch)
        (folder / branch / "README.md").write_text("not needed")
    (folder / "step2").mkdir()
    (folder / "step2" / "config.json").write_text("{}")
    (folder / "step2" / "pytorch_model.bin").write_bytes(b"pickled")
    return folder


@pytest.fixture
def hub(revisions, monkeypatch, tmp_path):
    with hub_server(NAME, revisions) as (endpoint, downloaded):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        (tmp_path / "temporary").mkdir()
        import huggingface_hub.constants as constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield downloaded


@torch.no_grad()
def test_a_revision_by_name(hub, revisions):
    tokens = torch.arange(20)[None]
    model = from_pretrained(NAME, revision="step4")
    assert torch.equal(model(tokens), from_pretrained(revisions / "step4")(tokens))
    assert (model.source.path, model.source.revision) == (NAME, "step4")
    assert not torch.equal(model(tokens), from_pretrained(NAME)(tokens))
    # What no reader opens is not fetched.
    assert "step4/model.safetensors" in hub and not any("README" in file for file in hub)


def test_a_series_is_streamed_and_equal_weights_are_fetched_once(hub, tmp_path):
    assert open_series(NAME).steps == (0, 1, 2, 4)
    options = {"n_sequences": 2, "period": 6, "repeats": 2, "scores": ["prefix_matching"], "n_maps": 1}
    report = detect(NAME, steps="0,1,2,3,4", **options)
    assert [c.step for c in report.checkpoints] == [0, 1, 4]
    assert [c.same_weights_as_step for c in report.checkpoints] == [None, 0, None]
    assert [file for file in hub if file.endswith(".safetensors")] == [
        "step0/model.safetensors",
        "step4/model.safetensors",
    ]
    assert report.missing_steps == (3,)
    assert any("step 2: " in note and "pickled (pytorch_model.bin)" in note for note in report.notes)
    # Nothing of it stays on the disk.
    assert list((tmp_path / "temporary").iterdir()) == []
    assert report.model["path"] == NAME and report.model["revision"] == "step4"


def test_one_line_for_what_is_not_there(hub, revisions):
    for path, revision, text in (
        (NAME, "step9", f"{NAME} has no revision 'step9' on the hub"),
        ("someone/other", None, "'someone/other' is neither a local path nor a model on the hub"),
        (NAME, "step2", "the weights are pickled (pytorch_model.bin)"),
    ):
        with pytest.raises(CheckpointError) as error:
            from_pretrained(path, revision=revision)
        assert text in str(error.value) and "\n" not in str(error.value)
    assert not any(file.endswith(".bin") for file in hub)


def test_the_cache_is_used_without_a_network(hub, monkeypatch):
    model = from_pretrained(NAME, revision="step4")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    again = from_pretrained(NAME, revision="step4")
    assert again.source.weight_sha256 == model.source.weight_sha256


def test_a_local_folder_of_revisions(revisions, tmp_path):
    folder = tmp_path / "revisions"
    shutil.copytree(revisions, folder)
    assert from_pretrained(folder, revision="step1").source.revision == "step1"
    with pytest.raises(
        CheckpointError, match="has no revision 'step7': a local folder of revisions has one folder for each"
    ):
        from_pretrained(folder, revision="step7")
