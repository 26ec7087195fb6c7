"""Prints of the commands: any encoding, a full disk, a closed stdout."""

import io
import os
import sys

import pytest

from interp.standard_output import OutputError, printed, say


def test_characters_that_the_encoding_lacks_are_replaced(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    say("0.85 ±0.01 · nats")
    assert out.buffer.getvalue() == b"0.85 ?0.01 ? nats\n"


def test_what_cannot_be_written_is_one_error_and_ends_there(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OutputError, match="closed: 'stdout'"):
        say("words")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OutputError, match="No space left on device: 'stdout'"), printed():
            print("words")
        # It leads nowhere now, so that the end of the process does not fail again.
        say("more")


def test_a_reader_that_went_away_is_told_apart(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(BrokenPipeError):
            say("words")


def test_commands_end_in_one_line(monkeypatch, capsys, tmp_path):
    from mixer_cases import FOLDER

    from experiments import cases, cli, demo

    monkeypatch.setattr(demo, "train_all", lambda out: say("training") or [])
    mixers = tmp_path / "mixers"
    mixers.mkdir()
    (mixers / "conv_t1.safetensors").write_bytes((FOLDER / "conv_t1.safetensors").read_bytes())
    commands = (
        (cases.main, [str(tmp_path)], "cases"),
        (cli.main, ["--list"], "train-lm"),
        (demo.main, ["--out", str(tmp_path / "demo")], "demo"),
    )
    for main, words, name in commands:
        with open("/dev/full", "w") as full, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", full)
            assert main(words) == 1
        assert capsys.readouterr().err == f"{name}: stdout: No space left on device\n"


def test_demo_needs_a_folder(tmp_path, capsys):
    from experiments.demo import main

    (tmp_path / "file").write_text("text")
    for out, message in ((tmp_path / "file", "is a file"), ("/proc/x", "cannot be made")):
        assert main(["--out", str(out)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"demo: {out} {message}") and error.count("\n") == 1
