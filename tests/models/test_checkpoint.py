"""Checkpoints: round trip, refusals in one line, and writes that happen whole or not at all."""

import json
import os
import resource
import shutil
import subprocess

import language_models
import pytest
import safetensors.torch
import torch

import models.disk
from models import CheckpointError, ConfigError, LanguageModel, list_checkpoints, load_model, save_model

NAMES = list(language_models.CONFIGS)


@pytest.fixture
def saved(tmp_path):
    """A saved model and its folder."""
    model = language_models.build("hybrid", dtype=torch.float32)
    return model, save_model(tmp_path / "model", model)


def listing(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def contents(folder) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def refusal(call, kind=CheckpointError) -> str:
    with pytest.raises(kind) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and len(message) < 400
    return message


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name, tmp_path):
    model = language_models.build(name)
    folder = save_model(tmp_path / "a" / "b", model)
    again = load_model(folder)
    assert again.config == model.config and not again.training
    assert list(again.state_dict()) == list(model.state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value) and again.state_dict()[key].dtype == value.dtype
    tokens = language_models.tokens()
    assert torch.equal(again(tokens), model(tokens))
    assert listing(folder) == ["config.json", "model.safetensors"]
    assert json.loads((folder / "config.json").read_text())["format"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precision_weights(dtype, tmp_path):
    model = language_models.build("hybrid", dtype=torch.float32).to(dtype)
    folder = save_model(tmp_path / "model", model)
    assert load_model(folder).cfg.dtype == dtype
    widened = load_model(folder, dtype=torch.float32)
    assert widened.cfg.dtype == torch.float32
    assert torch.equal(widened.W_E, model.W_E.float())
    assert torch.isfinite(widened(language_models.tokens())).all()


def test_prefixes_of_wrappers_are_stripped(tmp_path):
    model = language_models.build("hybrid", dtype=torch.float32)
    names = listing_of_tensors = list(model.state_dict())
    compiled = torch.compile(model, backend="eager")
    wrapped = torch.nn.DataParallel(compiled)
    for i, wrapper in enumerate((compiled, wrapped)):
        folder = save_model(tmp_path / str(i), wrapper)
        assert sorted(safetensors.torch.load_file(folder / "model.safetensors")) == sorted(names)
        assert torch.equal(load_model(folder).W_E, model.W_E)
    inside = language_models.build("hybrid", dtype=torch.float32)
    for i, block in enumerate(inside.blocks):
        inside.blocks[i] = torch.compile(block, backend="eager")
    folder = save_model(tmp_path / "blocks", inside)
    assert sorted(safetensors.torch.load_file(folder / "model.safetensors")) == sorted(listing_of_tensors)
    with pytest.raises(ConfigError, match="a Linear is not a LanguageModel"):
        save_model(tmp_path / "linear", torch.nn.Linear(2, 2))


def test_extra_files_and_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    model = LanguageModel(language_models.CONFIGS["softmax"], tokenizer=tokenizer)
    extra = {"training.json": "{}", "raw": b"\0", "training.safetensors": {"step": torch.tensor([3])}}
    folder = save_model(tmp_path / "model", model, extra_files=extra)
    assert listing(folder) == sorted([*extra, "config.json", "model.safetensors", "tokenizer.json"])
    assert safetensors.torch.load_file(folder / "training.safetensors")["step"].item() == 3
    again = load_model(folder)
    assert again.to_tokens("ab").tolist() == [[0, 1]] and again.to_string(torch.tensor([1, 0])) in (
        "ba",
        "b a",
    )
    for name in ("config.json", "../outside", "a/b"):
        assert "plain name" in refusal(
            lambda n=name: save_model(folder, model, extra_files={n: ""}), ConfigError
        )
    (folder / "tokenizer.json").write_text("{]")
    assert "is not a tokenizer" in refusal(lambda: load_model(folder))


def test_paths_that_are_not_checkpoints(tmp_path):
    assert "nowhere does not exist" in refusal(lambda: load_model(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "is empty: no checkpoint" in refusal(lambda: load_model(tmp_path / "empty"))
    (tmp_path / "file").write_text("")
    assert "is a file; accepted: a checkpoint folder" in refusal(lambda: load_model(tmp_path / "file"))
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "only pickled weights (pytorch_model.bin)" in refusal(lambda: load_model(tmp_path / "pickled"))


def test_missing_files(saved):
    _, folder = saved
    (folder / "config.json").rename(folder / "other.json")
    assert "config.json is missing" in refusal(lambda: load_model(folder))
    (folder / "other.json").rename(folder / "config.json")
    (folder / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refusal(lambda: load_model(folder))


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_truncated_weights(saved, kept):
    _, folder = saved
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    message = refusal(lambda: load_model(folder))
    assert "model.safetensors is damaged, truncated or unreadable" in message


@pytest.mark.parametrize(
    ("change", "message", "kind"),
    [
        ({"format": 2}, "has format 2; accepted: format 1", ConfigError),
        ({"format": None}, "has format None; accepted: format 1", ConfigError),
        ({"n_layrs": 1}, "no key 'n_layrs'; did you mean n_layers?", ConfigError),
        ({"d_model": 15}, "divide into", ConfigError),
        ({"d_vocab": 14}, "tensor 'embed.W_E' has shape [13, 16], but config.json makes it [14, 16]", None),
        ({"mlp": None}, "has an unexpected tensor 'blocks.0.", None),
        (
            {"tied": False, "norm": "layer", "norm_bias": True},
            "lacks the tensor 'blocks.0.ln1.b' and 8 more",
            None,
        ),
    ],
)
def test_config_that_does_not_fit(saved, change, message, kind):
    _, folder = saved
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert message in refusal(lambda: load_model(folder), kind or CheckpointError)


def test_config_that_is_not_ours(saved):
    _, folder = saved
    path = folder / "config.json"
    path.write_text('{"format": 1, ')
    assert "cannot be read as JSON" in refusal(lambda: load_model(folder))
    path.write_text('{"model_type": "gpt2"}')
    message = refusal(lambda: load_model(folder), ConfigError)
    assert "Hugging Face model of type 'gpt2', which models.pretrained.from_pretrained reads" in message
    path.write_text("[]")
    assert 'no "format" number' in refusal(lambda: load_model(folder), ConfigError)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(saved, value):
    model, folder = saved
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["blocks.1.attn.out_proj.weight"][3, 2] = value
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    total = tensors["blocks.1.attn.out_proj.weight"].numel()
    message = refusal(lambda: load_model(folder))
    assert f"'blocks.1.attn.out_proj.weight' has 1 NaN or infinite values of {total}" in message


def test_weights_of_another_kind(saved):
    _, folder = saved
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["embed.W_E"] = tensors["embed.W_E"].to(torch.int8)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    assert "'embed.W_E' has dtype torch.int8" in refusal(lambda: load_model(folder))
    del tensors["embed.W_E"]
    tensors["embed.WE"] = torch.zeros(1)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    assert "lacks the tensor 'embed.W_E'" in refusal(lambda: load_model(folder))


def test_replacing_a_checkpoint_leaves_one(saved):
    model, folder = saved
    with torch.no_grad():
        model.embed.W_E += 1
    save_model(folder, model)
    assert torch.equal(load_model(folder).W_E, model.W_E)
    assert listing(folder.parent) == ["model"]


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("where", ["first file", "last file", "fsync", "rename"])
def test_a_failed_write_leaves_the_old_checkpoint(saved, monkeypatch, where, exchange):
    model, folder = saved
    before = contents(folder)
    if not exchange:
        monkeypatch.setattr(models.disk, "_exchange", lambda a, b: False)
    calls = []

    def fail(*args, **options):
        calls.append(args)
        raise OSError(28, "No space left on device")

    if where == "first file":
        monkeypatch.setattr(safetensors.torch, "save_file", fail)
    elif where == "last file":
        monkeypatch.setattr("pathlib.Path.write_bytes", fail)
    elif where == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(models.disk, "_replace", fail)
    message = refusal(lambda: save_model(folder, model, extra_files={"z": b"1"}))
    assert "could not be written: [Errno 28] No space left on device" in message and calls
    monkeypatch.undo()
    assert contents(folder) == before and listing(folder.parent) == ["model"]
    load_model(folder)


def test_an_interrupt_leaves_nothing_temporary(saved, monkeypatch):
    model, folder = saved
    before = contents(folder)

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.torch, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_model(folder, model)
    assert contents(folder) == before and listing(folder.parent) == ["model"]


def test_without_an_atomic_exchange(saved, monkeypatch):
    model, folder = saved
    monkeypatch.setattr(models.disk, "_exchange", lambda a, b: False)
    with torch.no_grad():
        model.embed.W_E += 1
    save_model(folder, model)
    assert torch.equal(load_model(folder).W_E, model.W_E) and listing(folder.parent) == ["model"]
    # A writer killed between the two renames left the old folder aside: the next one puts it back first.
    folder.rename(folder.with_name(".model.tmp-00-old"))
    (folder.parent / ".model.tmp-00").mkdir()
    monkeypatch.setattr(
        safetensors.torch, "save_file", lambda *a, **k: (_ for _ in ()).throw(OSError("full"))
    )
    refusal(lambda: save_model(folder, model))
    assert listing(folder.parent) == ["model"] and torch.equal(load_model(folder).W_E, model.W_E)


def saved_under_a_file_size_limit(folder, model, limit: int) -> str:
    """What a forked process, whose files may not grow beyond `limit` bytes, answers to saving a model."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            save_model(folder, model)
            answer = "saved"
        except CheckpointError as error:
            answer = f"refused: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with os.fdopen(read) as pipe:
        return pipe.read()


def test_a_file_size_limit_is_a_disk_that_fills(saved):
    model, folder = saved
    before = contents(folder)
    message = saved_under_a_file_size_limit(folder, model, 4096)
    assert "refused:" in message and "could not be written" in message
    assert contents(folder) == before and listing(folder.parent) == ["model"]
    assert saved_under_a_file_size_limit(folder, model, 10**7) == "saved"


def test_a_full_file_system(tmp_path):
    """A real one, where this process may mount a small tmpfs."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], check=False, capture_output=True
    )
    if mount.returncode:
        pytest.skip("this process may not mount a file system")
    try:
        model = LanguageModel(language_models.CONFIGS["plain"])
        folder = save_model(disk / "model", model)
        before = contents(folder)
        (disk / "filler").write_bytes(b"0" * (shutil.disk_usage(disk).free - 4096))
        assert "could not be written" in refusal(lambda: save_model(folder, model))
        assert contents(folder) == before and listing(disk) == ["filler", "model"]
        load_model(folder)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_list_checkpoints(tmp_path):
    run = tmp_path / "run"
    assert "does not exist" in refusal(lambda: list_checkpoints(run))
    run.mkdir()
    assert "holds no checkpoint" in refusal(lambda: list_checkpoints(run))
    model = LanguageModel(language_models.CONFIGS["plain"])
    for step in (1000, 0, 20):
        save_model(run / f"step_{step:08d}", model)
    (run / "metrics.jsonl").write_text("")
    (run / ".step_00000005.tmp-ab").mkdir()
    assert [step for step, _ in list_checkpoints(run)] == [0, 20, 1000]
    assert list_checkpoints(run)[1][1] == run / "step_00000020"
    other = LanguageModel(language_models.CONFIGS["plain"].replace(d_vocab=17))
    save_model(run / "step_00000030", other)
    message = refusal(lambda: list_checkpoints(run))
    assert "mixes two models: step_00000000 has d_vocab = 13, step_00000030 has d_vocab = 17" in message
    shutil.rmtree(run / "step_00000030")
    (run / "step_00000040").mkdir()
    assert "step_00000040 is empty" in refusal(lambda: list_checkpoints(run))


def test_two_folders_of_one_step_are_refused(saved):
    _, folder = saved
    run = folder.parent / "run"
    for name in ("step_12", "step_00000012", "step_00000013"):
        shutil.copytree(folder, run / name)
    message = refusal(lambda: list_checkpoints(run))
    assert "two folders of step 12: step_00000012 and step_12" in message


def test_a_run_folder_is_not_a_checkpoint(tmp_path):
    for step in (0, 10):
        (tmp_path / f"step_{step:08d}").mkdir()
    with pytest.raises(CheckpointError, match="is a run, not one checkpoint; accepted: .*step_00000010"):
        load_model(tmp_path)
