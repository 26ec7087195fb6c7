"""How a vocabulary spells one token: text, or bytes where the token is a fragment of a character."""

import re
from functools import cache
from typing import Any

# Tokens of single bytes in vocabularies of SentencePiece.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
# SentencePiece's mark for a blank.
BLANK = "\u2581"


def spelling(tokenizer: Any, token: int) -> str | bytes:
    """A token's text; its bytes where it holds no whole character; its number where there is no tokenizer."""
    if tokenizer is None:
        return str(token)
    piece = _piece(tokenizer, token)
    text = tokenizer.decode([token])
    if (byte := _BYTE.fullmatch(piece or "")) is not None:
        return bytes.fromhex(byte[1])
    if piece is not None and _REPLACEMENT in text and _REPLACEMENT not in piece:
        return _bytes_of(piece) or text
    if piece is not None and piece.startswith(BLANK) and not text.startswith(" "):
        return " " + text
    # Special tokens decode to nothing.
    return text or piece or ""


def _piece(tokenizer: Any, token: int) -> str | None:
    if hasattr(tokenizer, "id_to_token"):
        return tokenizer.id_to_token(token)
    return tokenizer.convert_ids_to_tokens(token)


def _bytes_of(piece: str) -> bytes | None:
    """Bytes that byte-level BPE writes as this piece; None for characters outside its alphabet."""
    table = _byte_level()
    if any(character not in table for character in piece):
        return None
    return bytes(table[character] for character in piece)


@cache
def _byte_level() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for characters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
