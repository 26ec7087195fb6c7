"""Tokenizers as files of the `tokenizers` library: bytes, or a byte-level BPE trained on training documents.

Id 0 is the separator between documents in both: the NUL byte, or the special token `<|endoftext|>`.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from jaxtyping import UInt16

SEPARATOR = 0
SEPARATOR_TEXT = "<|endoftext|>"


def byte_tokenizer_json() -> str:
    """`tokenizer.json` in which id = byte: a byte-level BPE without merges (needs no library to be made)."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": [],
            },
        },
        ensure_ascii=False,
    )


def train_bpe(texts: Iterable[str], d_vocab: int) -> str:
    """`tokenizer.json` of a byte-level BPE with at most `d_vocab` entries: the separator, 256 bytes,
    merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=d_vocab,
        special_tokens=[SEPARATOR_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def encode_bytes(texts: Iterable[str]) -> Iterator[UInt16[np.ndarray, " tokens"]]:
    """Each text as its UTF-8 bytes, a NUL after it; NULs inside become blanks."""
    for text in texts:
        data = text.encode("utf-8", errors="replace").replace(b"\0", b" ") + b"\0"
        yield np.frombuffer(data, dtype=np.uint8).astype(np.uint16)


def encode_bpe(
    tokenizer_json: str, texts: Iterable[str], *, block: int = 256
) -> Iterator[UInt16[np.ndarray, " tokens"]]:
    """Each text in tokens, the separator after it. The separator's text inside a document is not special."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True
    source = iter(texts)
    while part := list(islice(source, block)):
        for encoding in tokenizer.encode_batch_fast(part, add_special_tokens=False):
            yield np.array([*encoding.ids, SEPARATOR], dtype=np.uint16)


def tokenizer_beside(path: Path) -> str | None:
    """The text of `tokenizer.json` next to a token file: `NAME.tokenizer.json`, else `tokenizer.json`; None
    without.
    """
    for candidate in (
        path.with_name(f"{path.name.split('.')[0]}.tokenizer.json"),
        path.with_name("tokenizer.json"),
    ):
        if candidate.is_file():
            return candidate.read_text("utf-8")
    return None


def _byte_characters() -> list[str]:
    # GPT-2's printable stand-in for each byte: itself where printable, else the next code point from 256.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    characters, spare = [], 256
    for byte in range(256):
        characters.append(chr(byte) if byte in printable else chr(spare))
        spare += byte not in printable
    return characters
