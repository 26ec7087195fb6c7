"""Text to train on and to measure loss on: Python's own standard library, a file, or a folder."""

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from interp.errors import DetectionError

# Installed packages live under the standard library's folder and differ from machine to machine.
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
_TEXT_SUFFIXES = {".py", ".txt", ".md", ".rst", ".html", ".tex", ".c", ".h", ".json", ".csv", ".text"}
_PIECE_CHARACTERS = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text and a name for it that is the same on every machine."""

    name: str
    text: str


def documents(source: str | Path | None = None) -> list[Document]:
    """All documents of a source, in the order of their names.

    Args:
        source: None for the running Python's standard library (its `.py` files, about 30 MB); a folder for
            all text files below it; a `.jsonl` file for one document a line (key `text`); any other file for
            that file, cut at blank lines into pieces of 16,384 characters or more, so that a part can be held
            out.

    Raises:
        DetectionError: the path does not exist, or holds no text.
    """
    if source is None:
        root = Path(sysconfig.get_path("stdlib"))
        found = _read_all(root, (p for p in root.rglob("*.py") if not _NOT_STDLIB & set(p.parts)))
    elif (path := Path(source)).is_dir():
        files = (
            p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in _TEXT_SUFFIXES | {".jsonl"}
        )
        found = _read_all(path, files)
    elif path.is_file():
        found = _read_file(path, path.name, in_pieces=True)
    else:
        raise DetectionError(
            f"no text at {source}: give a file, a folder, or nothing for the standard library"
        )
    if not found:
        raise DetectionError(
            f"no text in {source}: accepted are {', '.join(sorted(_TEXT_SUFFIXES))} and .jsonl"
        )
    return found


def split_by_document(
    whole: Sequence[Document], fraction: float, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """Part the documents in two, `(kept, held_out)`, no document in both, each in the order of `whole`.

    Documents are taken in an order that a hash of seed and name gives, until the held-out part has at least
    `fraction` of all characters; so one more document in the source moves few others.

    Raises:
        DetectionError: fewer than two documents, or a fraction outside (0, 1).
    """
    if not 0 < fraction < 1:
        raise DetectionError(f"a held-out fraction of {fraction} is outside (0, 1)")
    if len(whole) < 2:
        raise DetectionError(f"{len(whole)} document cannot be parted in two; give two documents or more")
    order = _order(whole, seed)
    target = fraction * sum(len(document.text) for document in whole)
    held_out: set[int] = set()
    size = 0
    for n in order[:-1]:
        if size >= target:
            break
        held_out.add(n)
        size += len(whole[n].text)
    kept = [document for n, document in enumerate(whole) if n not in held_out]
    return kept, [whole[n] for n in sorted(held_out)]


def in_hash_order(whole: Sequence[Document], seed: int = 0) -> list[Document]:
    """The documents in the order in which `split_by_document` holds them out: the first ones first."""
    return [whole[n] for n in _order(whole, seed)]


def _order(whole: Sequence[Document], seed: int) -> list[int]:
    return sorted(range(len(whole)), key=lambda n: (_hash(seed, whole[n].name), n))


def _read_all(root: Path, files: Iterable[Path]) -> list[Document]:
    named = sorted((path.relative_to(root).as_posix(), path) for path in files)
    return [document for name, path in named for document in _read_file(path, name, in_pieces=False)]


def _read_file(path: Path, name: str, *, in_pieces: bool) -> list[Document]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        # Not text, or in another encoding (the standard library has a few such test files): left out.
        return []
    if path.suffix == ".jsonl":
        texts = [_text(path, n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    elif in_pieces:
        texts = _pieces(text)
    else:
        return [Document(name=name, text=text)] if text.strip() else []
    return [Document(name=f"{name}#{n:05d}", text=part) for n, part in enumerate(texts) if part.strip()]


def _text(path: Path, n: int, line: str) -> str:
    try:
        found = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, str):
        raise DetectionError(f"{path} line {n} is {line[:40]!r}; accepted: a JSON object with a text")
    return found


def _pieces(text: str) -> list[str]:
    pieces, start = [], 0
    while len(text) - start > 2 * _PIECE_CHARACTERS:
        stop = text.find("\n\n", start + _PIECE_CHARACTERS)
        # Text without blank lines is cut where the next line ends, or failing that after a fixed length.
        if stop < 0 or stop - start > 2 * _PIECE_CHARACTERS:
            stop = text.find("\n", start + _PIECE_CHARACTERS)
        if stop < 0 or stop - start > 2 * _PIECE_CHARACTERS:
            stop = start + _PIECE_CHARACTERS
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]


def _hash(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()
