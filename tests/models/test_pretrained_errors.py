"""Bad input: one clear line each, and nothing pickled is ever opened."""

import json
import shutil
from pathlib import Path

import hf_models
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import (
    LanguageModelConfig,
    LinearAttentionConfig,
    Mamba1Config,
    MLPConfig,
    RopeConfig,
    SoftmaxAttentionConfig,
)
from models.errors import CheckpointError, ConfigError
from models.language_model import LanguageModel
from models.pretrained import UnsupportedArchitecture, from_pretrained, to_pretrained


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    hf_models.llama().save_pretrained(folder / "one")
    hf_models.llama().save_pretrained(folder / "sharded", max_shard_size="8KB")
    return folder


@pytest.fixture
def folder(original, tmp_path) -> Path:
    return Path(shutil.copytree(original / "one", tmp_path / "model"))


def _config(folder: Path, **changes) -> None:
    values = json.loads((folder / "config.json").read_text())
    values.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v != "remove"}))


def _tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _refused(path, kind, text: str) -> None:
    with pytest.raises(kind) as error:
        from_pretrained(path)
    assert text in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


def test_missing_shard(original, tmp_path):
    folder = Path(shutil.copytree(original / "sharded", tmp_path / "model"))
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    _refused(
        folder, CheckpointError, f"shard {shards[1].name!r} is missing; the index names {len(shards)} shards"
    )


def test_index_that_leads_elsewhere(original, tmp_path):
    folder = Path(shutil.copytree(original / "sharded", tmp_path / "model"))
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["lm_head.weight"] = "../one/model.safetensors"
    index.write_text(json.dumps(values))
    _refused(folder, CheckpointError, "not an index of shards")
    index.write_text("{")
    _refused(folder, CheckpointError, "not an index of shards")


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "change, text",
    [
        (
            lambda t: t.update({NAME: t[NAME][:, :-1].contiguous()}),
            f"{NAME!r} has shape [40, 23]; its configuration needs [40, 24]",
        ),
        (lambda t: t.pop(NAME), f"tensor {NAME!r} is missing"),
        (lambda t: t.update({"model.extra.weight": torch.zeros(2)}), "'model.extra.weight' has no place"),
        (lambda t: t[NAME].fill_(torch.nan), f"{NAME!r} holds NaN"),
        (lambda t: t.update({NAME: t[NAME].to(torch.int8)}), f"{NAME!r} holds i8; accepted: floats"),
    ],
)
def test_tensors_that_do_not_fit(folder, change, text):
    _tensors(folder, change)
    _refused(folder, CheckpointError, text)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"num_hidden_layers": 1}, "has no place in the model that its configuration describes"),
        ({"num_hidden_layers": 3}, "'model.layers.2.input_layernorm.weight' is missing"),
        ({"intermediate_size": 48}, "its configuration needs [48, 24]"),
        (
            {"num_key_value_heads": 4},
            "'model.layers.0.self_attn.k_proj.weight' has shape [16, 24]; its configuration needs [32, 24]",
        ),
        (
            {"tie_word_embeddings": True},
            "tie_word_embeddings is true, but lm_head.weight differs from the embedding",
        ),
        ({"attention_bias": True}, "self_attn.q_proj.bias' is missing"),
        ({"vocab_size": 62}, "needs [62, 24]"),
    ],
)
def test_configuration_disagrees_with_weights(folder, changes, text):
    _config(folder, **changes)
    _refused(folder, CheckpointError, text)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"hidden_size": "large"}, "hidden_size is 'large'; accepted: a positive integer"),
        ({"hidden_size": "remove"}, "lacks the key 'hidden_size'"),
        ({"hidden_act": "tanhexp"}, "hidden_act is 'tanhexp'; accepted: gelu,"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 5.0}},
            "rope type is 'longrope'; accepted: default, linear,",
        ),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0}}, "lacks the key 'factor'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}; accepted: absent"),
    ],
)
def test_configuration_values(folder, changes, text):
    _config(folder, **changes)
    _refused(folder, ConfigError, text)


@pytest.mark.parametrize(
    "changes, text",
    [({"model_type": "rwkv"}, "has model_type 'rwkv'"), ({"model_type": "remove"}, "has no model_type")],
)
def test_unknown_architecture(folder, changes, text):
    _config(folder, **changes)
    _refused(folder, UnsupportedArchitecture, text + "; read here: gpt2, gpt_neox, llama, mamba, mamba2")


class Trap:
    """Unpickling this would create a file."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_pickled_weights_are_refused_and_not_loaded(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save(Trap(str(tmp_path / "opened")), folder / "pytorch_model.bin")
    _refused(folder, CheckpointError, "the weights are pickled (pytorch_model.bin), which is refused")
    assert not (tmp_path / "opened").exists()
    # The control: the trap does spring.
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "opened").exists()


def test_damaged_files(folder, tmp_path):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    _refused(folder, CheckpointError, "not a readable safetensors file")
    (folder / "config.json").write_text("{")
    _refused(folder, CheckpointError, "config.json: not JSON")
    (folder / "config.json").unlink()
    _refused(folder, CheckpointError, "holds no config.json")
    _refused(tmp_path / "absent", CheckpointError, "does not exist")


def test_no_network_is_one_line(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    _refused(
        "someone/a-model",
        CheckpointError,
        "'someone/a-model' is no local path, and the hub cannot be reached",
    )


def test_absent_and_broken_tokenizer(folder):
    model = from_pretrained(folder)
    assert model.tokenizer is None
    with pytest.raises(ConfigError, match="^this model has no tokenizer: give token ids, an integer tensor"):
        model("some text")
    (folder / "tokenizer.json").write_text("{}")
    _refused(folder, CheckpointError, "tokenizer.json: not a tokenizer")


def _model(mixer, **changes) -> LanguageModel:
    values = {"d_model": 16, "n_layers": 1, "d_vocab": 11, "n_ctx": 20} | changes
    return LanguageModel(LanguageModelConfig(mixers=(mixer,) * values["n_layers"], **values))


ROPE = {"positions": "rope", "rope": RopeConfig()}


@pytest.mark.parametrize(
    "mixer, changes, text",
    [
        (LinearAttentionConfig(n_heads=2), {}, "no Hugging Face architecture here has the mixers linear"),
        (SoftmaxAttentionConfig(n_heads=2, d_conv=4), ROPE, "Llama has no d_conv; this model has d_conv = 4"),
        (SoftmaxAttentionConfig(n_heads=2, sink=True), ROPE, "Llama has no sink"),
        (SoftmaxAttentionConfig(n_heads=2, scale=0.1), ROPE, "this model has scale = 0.1"),
        (
            SoftmaxAttentionConfig(n_heads=2),
            {},
            "Llama has norm 'rms' and rotary positions, not norm 'rms' and positions 'none'",
        ),
        (
            SoftmaxAttentionConfig(n_heads=2),
            {**ROPE, "mlp": MLPConfig(d_mlp=8)},
            "Llama has a serial residual stream and a gated MLP",
        ),
        (Mamba1Config(constant_bcdt=True), {}, "Mamba has no constant_bcdt"),
        (Mamba1Config(d_inner=24), {}, "d_inner = 24 and d_model = 16"),
        (Mamba1Config(), {"unembed_bias": True}, "Mamba has no unembedding bias"),
    ],
)
def test_what_cannot_be_exported_is_named(mixer, changes, text, tmp_path):
    with pytest.raises(ConfigError) as error:
        to_pretrained(tmp_path / "out", _model(mixer, **changes))
    assert text in str(error.value), str(error.value)
    assert list(tmp_path.iterdir()) == []
