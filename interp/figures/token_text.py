"""Tokens as text that can be seen and cannot act: whitespace visible, controls and byte fragments named,
escaped."""

import html
import unicodedata

VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
# Joiners and variation selectors build emoji and some scripts: they stay.
KEPT = {"\u200d", "\u200c", "\ufe0f"}
ISOLATE, POP = "\u2068", "\u2069"


def visible(token: str | bytes, *, limit: int | None = None) -> str:
    """One token as plain visible text, not yet escaped.

    Whitespace becomes a symbol; control, format (bidirectional overrides among them) and unpaired surrogate
    characters
    become their code point in angle brackets, bytes that are not UTF-8 their hexadecimal values. Cut at
    `limit`
    characters.
    """
    if isinstance(token, bytes):
        try:
            token = token.decode("utf-8")
        except UnicodeDecodeError:
            return _cut("⟨" + token.hex(" ").upper() + "⟩", limit)
    return _cut("".join(_character(character) for character in token) or "∅", limit)


def _character(character: str) -> str:
    if character in VISIBLE:
        return VISIBLE[character]
    if character in KEPT:
        return character
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"⟨U+{ord(character):04X}⟩"
    return character


def _cut(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def label(token: str | bytes, *, limit: int | None = 12) -> str:
    """A token for a plotly label: visible, escaped, and isolated where it reads from right to left.

    Plotly reads a small set of tags and entities in every text; `%` and braces only matter in templates,
    into which
    tokens are never put.
    """
    text = visible(token, limit=limit)
    escaped = html.escape(text, quote=False).replace("$", "&#36;")
    if any(unicodedata.bidirectional(character) in ("R", "AL") for character in text):
        return ISOLATE + escaped + POP
    return escaped
