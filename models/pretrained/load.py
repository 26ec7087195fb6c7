"""A model from a Hugging Face folder or a GGUF file, in our own mixers."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from models.config import LanguageModelConfig
from models.errors import CheckpointError, ConfigError
from models.pretrained.gpt2 import GPT2
from models.pretrained.gpt_neox import GPT_NEOX
from models.pretrained.keys import Keys, UnsupportedArchitecture, read_json
from models.pretrained.llama import LLAMA
from models.pretrained.mamba import MAMBA, MAMBA2
from models.pretrained.names import Architecture, Entry, read_state
from models.pretrained.tokens import Vocabulary, folder_vocabulary, gguf_vocabulary
from models.pretrained.weights import StoredTensor, Weights, dtypes, open_safetensors, sha256

ARCHITECTURES: dict[str, Architecture] = {a.model_type: a for a in (GPT2, GPT_NEOX, LLAMA, MAMBA, MAMBA2)}


@dataclass(frozen=True, kw_only=True)
class PretrainedSource:
    """Where a model's weights came from and what its files say; goes into every report.

    Attributes:
        path, revision: The folder, file or hub name, and the hub revision.
        format: "safetensors" or "gguf". `architecture`: Hugging Face's model_type.
        stored_dtype: Dtypes in the file, the one with the most numbers first. `dtype`: in which the model
            computes.
        bos: Id of the beginning-of-sequence token. `adds_bos`: whether its own tokenizer prepends it (None:
            not said).
        special: Ids of special tokens. `tokenizer`: where it was read, or why there is none.
        tied: Whether the unembedding is the embedding.
        norm_folding: Always "none": gains stay in their norms, nothing is centred.
        weight_sha256: Hash of the weights as stored.
        notes: What was left out or assumed.
    """

    path: str
    revision: str | None
    format: str
    architecture: str
    stored_dtype: str
    dtype: str
    bos: int | None
    adds_bos: bool | None
    special: tuple[int, ...]
    tokenizer: str
    tied: bool
    norm_folding: str = "none"
    weight_sha256: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A foreign model on disk: its configuration is read and checked, its weights are not read yet.

    `stored` are the weights under the file's own names, `weights` under those of the architecture's table.
    """

    path: Path
    format: str
    architecture: Architecture
    keys: Keys
    config: LanguageModelConfig
    stored: Weights
    weights: Weights
    vocabulary: Vocabulary


def open_pretrained(path: str | Path) -> OpenedModel:
    """Open a Hugging Face folder or a `.gguf` file.

    Raises:
        UnsupportedArchitecture: no reader for this kind of model; the message lists those there are.
        CheckpointError, ConfigError: the files cannot be read, or their values are not accepted.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} holds no config.json: not a Hugging Face model folder")
        values, where = read_json(path / "config.json"), str(path / "config.json")
        architecture = _architecture(values, where)
        weights, vocabulary = open_safetensors(path), folder_vocabulary(path)
    else:
        from models.pretrained.gguf import read_gguf

        values, weights, fields = read_gguf(path)
        where, architecture, vocabulary = str(path), _architecture(values, str(path)), gguf_vocabulary(fields)
    keys = Keys(values, where)
    keys.refuse("quantization_config")
    return OpenedModel(
        path=path,
        format="safetensors" if path.is_dir() else "gguf",
        architecture=architecture,
        keys=keys,
        config=architecture.read_config(keys),
        stored=weights,
        weights=_full_names(weights, architecture),
        vocabulary=vocabulary,
    )


def load_opened(
    opened: OpenedModel,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    name: str | None = None,
    revision: str | None = None,
) -> Any:
    """The LanguageModel of an opened model, in evaluation mode, with its `tokenizer` and its `source`.

    Raises:
        CheckpointError: weights that are missing, left over, of another shape than the configuration says,
            or NaN.
    """
    from models.language_model import LanguageModel

    where = str(opened.path)
    entries = opened.architecture.entries(opened.config)
    _check_leftover(opened, entries, where)
    model = LanguageModel(opened.config, tokenizer=opened.vocabulary.tokenizer).to(dtype)
    state = model.state_dict()
    filled = set()
    with torch.no_grad():
        for ours, tensor in read_state(entries, opened.weights, state, where):
            state[ours].copy_(tensor)
            filled.add(ours)
    if filled != set(state):
        raise ConfigError(
            f"{where}: no weights for {sorted(set(state) - filled)[0]!r}: its table is incomplete"
        )
    model.source = _source(opened, dtype, name, revision)
    return model.to(device).eval()


def _source(
    opened: OpenedModel, dtype: torch.dtype, name: str | None, revision: str | None
) -> PretrainedSource:
    config, given = opened.config, opened.keys.values.get("bos_token_id")
    notes = []
    if given is not None and config.bos is None:
        notes.append(f"bos_token_id {given} is outside the vocabulary of {config.d_vocab}: no BOS")
    if (
        opened.architecture.model_type.startswith("mamba")
        and "max_position_embeddings" not in opened.keys.values
    ):
        notes.append(
            f"the files give no context length: n_ctx = {config.n_ctx} is assumed (nothing is cut there)"
        )
    if config.rope is not None and (config.rope.scaling or {}).get("type") == "dynamic":
        notes.append(f"dynamic rotary scaling: sequences longer than {config.n_ctx} are not rescaled")
    return PretrainedSource(
        path=name or str(opened.path),
        revision=revision,
        format=opened.format,
        architecture=opened.architecture.model_type,
        stored_dtype=dtypes(opened.weights),
        dtype=str(dtype).removeprefix("torch."),
        bos=config.bos,
        adds_bos=opened.vocabulary.adds_bos,
        special=tuple(ident for ident in opened.vocabulary.special if ident < config.d_vocab),
        tokenizer=opened.vocabulary.origin,
        tied=config.tied,
        weight_sha256=sha256(opened.stored),
        notes=tuple(notes),
    )


def _architecture(values: dict[str, Any], where: str) -> Architecture:
    kind = values.get("model_type")
    if kind in ARCHITECTURES:
        return ARCHITECTURES[kind]
    what = "has no model_type" if kind is None else f"has model_type {kind!r}"
    raise UnsupportedArchitecture(f"{where} {what}; read here: {', '.join(ARCHITECTURES)}")


def _full_names(weights: Weights, architecture: Architecture) -> dict[str, StoredTensor]:
    """Names as the model with its head has them, whatever a checkpoint of the bare model leaves out."""
    prefix, heads = architecture.prefix, ("lm_head.", "embed_out.")
    renamed = {}
    for name, tensor in weights.items():
        if any(name.endswith(ending) for ending in architecture.ignored):
            continue
        full = name if name.startswith((prefix, *heads)) else prefix + name
        for old, new in architecture.renamed.items():
            full = new + full.removeprefix(old) if full.startswith(old) else full
        renamed[full] = tensor
    return renamed


def _check_leftover(opened: OpenedModel, entries: list[Entry], where: str) -> None:
    """Refuses tensors that the configuration has no place for, but for a copy of a tied unembedding."""
    known = {name for entry in entries for name in entry.theirs}
    left = [name for name in opened.weights if name not in known]
    if opened.config.tied:
        for head in [name for name in left if name in ("lm_head.weight", "embed_out.weight")]:
            embedding = next(entry.theirs[0] for entry in entries if entry.ours == ("embed.W_E",))
            stored = opened.weights
            same = stored[head].shape == stored[embedding].shape if embedding in stored else False
            if not same or not torch.equal(stored[head].load(), stored[embedding].load()):
                raise CheckpointError(
                    f"{where}: tie_word_embeddings is true, but {head} differs from the embedding"
                )
            left.remove(head)
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise CheckpointError(
            f"{where}: tensor {left[0]!r}{more} has no place in the model that its configuration describes"
        )
