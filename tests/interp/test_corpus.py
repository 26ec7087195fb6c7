"""Documents of a source, and the split that holds some out."""

import json

import pytest

from interp import corpus
from interp.errors import DetectionError


def test_a_folder_gives_its_texts_in_order_of_name(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.py").write_text("third")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "blank.txt").write_text(" \n")
    found = corpus.documents(tmp_path)
    assert [(d.name, d.text) for d in found] == [
        ("a.md", "first"),
        ("b.txt", "second"),
        ("sub/c.py", "third"),
    ]


def test_json_lines_are_a_document_each(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two")))
    assert [d.text for d in corpus.documents(path)] == ["one", "two"]


@pytest.mark.parametrize("unit", ["a paragraph of text\n\n", "lines without blanks\n", "x"])
def test_a_long_file_is_cut_without_losing_a_character(tmp_path, unit):
    path = tmp_path / "long.txt"
    whole = unit * (100_000 // len(unit))
    path.write_text(whole)
    found = corpus.documents(path)
    assert "".join(d.text for d in found) == whole
    assert len(found) > 2
    assert all(len(d.text) <= 3 * (1 << 14) for d in found)


def test_the_standard_library_is_the_default():
    found = corpus.documents()
    assert sum(len(d.text) for d in found) > 5_000_000
    assert "json/decoder.py" in {d.name for d in found}
    assert not any("site-packages" in d.name for d in found)


def test_split_holds_out_whole_documents_by_seed():
    whole = [corpus.Document(name=str(n), text="x" * (n + 1)) for n in range(40)]
    kept, held_out = corpus.split_by_document(whole, 0.2, seed=1)
    assert sorted(d.name for d in kept + held_out) == sorted(d.name for d in whole)
    share = sum(len(d.text) for d in held_out) / sum(len(d.text) for d in whole)
    assert 0.2 <= share < 0.26
    assert corpus.split_by_document(whole, 0.2, seed=1) == (kept, held_out)
    assert corpus.split_by_document(whole, 0.2, seed=2)[1] != held_out
    assert corpus.in_hash_order(whole, 1)[: len(held_out)] == sorted(
        held_out, key=corpus.in_hash_order(whole, 1).index
    )


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(DetectionError, match="no text at"):
        corpus.documents(tmp_path / "none")
    with pytest.raises(DetectionError, match="no text in"):
        corpus.documents(tmp_path)
    one = [corpus.Document(name="a", text="b")]
    with pytest.raises(DetectionError, match="two documents or more"):
        corpus.split_by_document(one, 0.5)
    with pytest.raises(DetectionError, match=r"outside \(0, 1\)"):
        corpus.split_by_document(one * 2, 1.5)
