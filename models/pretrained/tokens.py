"""Tokenizers and special tokens of foreign models, as their files have them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import CheckpointError
from models.pretrained.keys import read_json

# Ways to split text before merging, by GGUF's name for them; those that are one byte-level split, digits
# apart or not.
SPLIT_DIGITS = {"gpt-2": False, "smollm": True}
# GGUF's kinds of tokens that are not text: control and unused.
NOT_TEXT = (3, 5)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer and what its files say about special tokens.

    Attributes:
        tokenizer: A `tokenizers.Tokenizer`, or None.
        origin: The file it was read from, or why there is none.
        special: Ids of special tokens: control tokens, separators, padding.
        adds_bos: Whether the tokenizer puts BOS in front by itself; None where the files do not say.
        names: Role -> token text, such as "bos_token".
    """

    tokenizer: Any
    origin: str
    special: tuple[int, ...] = ()
    adds_bos: bool | None = None
    names: dict[str, str]


def folder_vocabulary(folder: Path) -> Vocabulary:
    """The `tokenizer.json` of a folder, with the roles that `tokenizer_config.json` gives.

    Raises:
        CheckpointError: a tokenizer file that cannot be read. Its absence is no error.
    """
    path = folder / "tokenizer.json"
    settings = (
        read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    )
    roles = {name: _text(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    roles = {name: text for name, text in roles.items() if text is not None}
    adds_bos = settings.get("add_bos_token")
    if path.is_file():
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
        # The library raises plain Exception.
        except Exception as error:
            raise CheckpointError(f"{path}: not a tokenizer ({' '.join(str(error).split())})") from None
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        path = folder / "vocab.json"
        tokenizer = _gpt2_files(folder, roles)
    else:
        return Vocabulary(tokenizer=None, origin="none: no tokenizer.json", adds_bos=adds_bos, names=roles)
    marked = {ident for ident, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    named = {tokenizer.token_to_id(text) for text in roles.values()} - {None}
    return Vocabulary(
        tokenizer=tokenizer,
        origin=path.name,
        special=tuple(sorted(marked | named)),
        adds_bos=adds_bos,
        names=roles,
    )


def gguf_vocabulary(fields: dict[str, Any]) -> Vocabulary:
    """The tokenizer in a GGUF header, if it is byte-level BPE with a known split; `origin` says where not."""
    tokens, kinds = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type", [])
    special = {ident for ident, kind in enumerate(kinds) if kind in NOT_TEXT}
    roles = {}
    for role in ("bos", "eos", "unknown", "padding"):
        ident = fields.get(f"tokenizer.ggml.{role}_token_id")
        if ident is not None and tokens and ident < len(tokens):
            special.add(ident)
            roles[{"unknown": "unk", "padding": "pad"}.get(role, role) + "_token"] = tokens[ident]
    found = {
        "special": tuple(sorted(special)),
        "adds_bos": fields.get("tokenizer.ggml.add_bos_token"),
        "names": roles,
    }
    model, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if tokens is None:
        return Vocabulary(tokenizer=None, origin="none: the file holds no tokens", **found)
    if model != "gpt2" or split not in SPLIT_DIGITS:
        return Vocabulary(
            tokenizer=None, origin=f"none: GGUF tokenizer {model!r} with split {split!r} is not read", **found
        )
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = _byte_level(
        {token: ident for ident, token in enumerate(tokens)}, merges, digits=SPLIT_DIGITS[split]
    )
    _mark_special(tokenizer, [tokens[ident] for ident in found["special"]])
    return Vocabulary(tokenizer=tokenizer, origin=f"GGUF header ({model}, split {split})", **found)


def _gpt2_files(folder: Path, roles: dict[str, str]) -> Any:
    lines = (folder / "merges.txt").read_text("utf-8").splitlines()
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    tokenizer = _byte_level(read_json(folder / "vocab.json"), merges, digits=False)
    _mark_special(tokenizer, sorted(set(roles.values())))
    return tokenizer


def _byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]], *, digits: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = [pre_tokenizers.Digits(individual_digits=True), level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts) if digits else level
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _mark_special(tokenizer: Any, texts: list[str]) -> None:
    from tokenizers import AddedToken

    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
