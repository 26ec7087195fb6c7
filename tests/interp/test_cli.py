"""`detect-induction` as a command: outputs, exit statuses, and one line for every bad input."""

import io
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from induction_circuit import induction_model
from language_models import build
from safetensors.torch import load, save_file

from interp.cli import main
from models.checkpoint import save_model
from models.language_model import LanguageModel


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    for step in (0, 10):
        save_model(folder / f"step_{step:08d}", induction_model())
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    return save_model(tmp_path / "model", induction_model())


def _refused(capsys, *argv, match):
    """The command ends with status 1 and one line that holds `match`; gives the line."""
    assert main([str(word) for word in argv]) == 1
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "checkpoint 1 of" not in line]
    assert out == "" and len(lines) == 1, (out, err)
    assert lines[0].startswith("detect-induction: error: ")
    assert match in lines[0], lines[0]


def test_table_and_files(run_folder, tmp_path, capsys):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "html")}
    options = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert main([str(run_folder), *options]) == 0
    out, err = capsys.readouterr()
    assert "L1H0" in out and "1 induction head: L1H0" in out
    assert "checkpoint 2 of 2, step 10" in err and f"wrote {files['json']}" in err
    assert max(map(len, out.splitlines())) <= 100
    record = json.loads(files["json"].read_text())
    assert [c["step"] for c in record["checkpoints"]] == [0, 10]
    assert len(files["csv"].read_text().splitlines()) == 1 + 2 * 4
    assert "<html" in files["html"].read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.csv", "out.html", "out.json"]


def test_quiet_and_options_of_the_probe(run_folder, tmp_path, capsys):
    file = tmp_path / "out.json"
    words = "--quiet --steps last --sequences 3 --period 6 --repeats 3 --seed 4 --json".split()
    assert main([str(run_folder), *words, str(file)]) == 0
    assert "checkpoint" not in capsys.readouterr().err
    record = json.loads(file.read_text())
    probe = record["probe"]
    assert [probe[key] for key in ("n_sequences", "period", "repeats", "seed", "bos")] == [3, 6, 3, 4, 0]
    assert len(record["checkpoints"]) == 1


def test_a_process_of_its_own_does_without_transformer_lens(run_folder, tmp_path):
    script = """
import sys
from interp.cli import main
status = main()
assert "torch" in sys.modules and "transformer_lens" not in sys.modules
sys.exit(status)
"""
    command = [sys.executable, "-c", script, str(run_folder), "--html", str(tmp_path / "out.html"), "--json"]
    done = subprocess.run([*command, str(tmp_path / "own.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert main([str(run_folder), "--quiet", "--json", str(tmp_path / "here.json")]) == 0
    own, here = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("own", "here"))
    for record in (own, here):
        record.pop("wall_s")
    assert own == here
    assert "<html" in (tmp_path / "out.html").read_text()


def test_a_process_that_ends_at_once_has_written_everything(run_folder, tmp_path, capsys):
    words = [str(run_folder), "--steps", "last", "--quiet", "--json"]
    assert main([*words, str(tmp_path / "here.json")]) == 0
    printed = capsys.readouterr().out
    command = [sys.executable, "-m", "interp.cli"]
    done = subprocess.run([*command, *words, str(tmp_path / "own.json")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, f"wrote {tmp_path / 'own.json'}\n")
    assert done.stdout.splitlines()[:-1] == printed.splitlines()[:-1]
    assert json.loads((tmp_path / "own.json").read_text())["checkpoints"]
    # A tool that watches the process still writes at its end.
    watched = [sys.executable, "-m", "cProfile", "-o", str(tmp_path / "profile"), *command[1:], *words[:-1]]
    assert subprocess.run(watched, capture_output=True).returncode == 0
    assert (tmp_path / "profile").stat().st_size > 0
    # A reader that has gone away is no error.
    child = subprocess.Popen([*command, *words[:-1]], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    assert (child.wait(), child.stderr.read()) == (0, b"")
    child.stderr.close()
    done = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("detect-induction: error: ") and done.stderr.count("\n") == 1


def test_help_is_quick_and_usage_errors_are_two():
    # Processor time: the clock on the wall also counts what else the machine is doing.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "interp.cli", "--help"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and "--mamba-units" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    for words in ([], ["x", "--period", "none"], ["x", "--repeats", "1"], ["x", "--mamba-units", "cluster"]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2


def test_paths_that_hold_no_model(tmp_path, capsys, monkeypatch):
    _refused(capsys, tmp_path / "nothing", match="does not exist")
    save_model(tmp_path / "runs" / "step_00000001", induction_model())
    monkeypatch.chdir(tmp_path)
    _refused(capsys, "runs/nothing", match="runs/nothing does not exist; runs is a folder of runs here")
    shutil.rmtree(tmp_path / "runs")
    _refused(capsys, tmp_path, match="is empty")
    (tmp_path / "notes.txt").write_text("text")
    _refused(capsys, tmp_path, match="holds no model")
    _refused(capsys, tmp_path / "notes.txt", match="file of another kind")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    _refused(capsys, tmp_path / "model.gguf", match="model.gguf")


def test_a_folder_that_mixes_two_models(run_folder, tmp_path, capsys):
    save_model(tmp_path / "step_00000000", induction_model())
    save_model(tmp_path / "step_00000010", build("linear"))
    _refused(capsys, tmp_path, match="mixes two models")
    (tmp_path / "config.json").write_text("{}")
    _refused(capsys, tmp_path, match="mixes models")


def test_damaged_weights(checkpoint, capsys):
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    tensors = load(whole)
    weights.write_bytes(whole[: len(whole) // 2])
    _refused(capsys, checkpoint, match="truncated")
    tensors["embed.W_E"][3, 3] = torch.nan
    save_file(tensors, weights)
    _refused(capsys, checkpoint, match="NaN")
    weights.unlink()
    _refused(capsys, checkpoint, match="model.safetensors is missing")


def test_damaged_configuration(checkpoint, capsys):
    path = checkpoint / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "n_layer": 2}))
    _refused(capsys, checkpoint, match="n_layer")
    path.write_text(json.dumps({**values, "format": 7}))
    _refused(capsys, checkpoint, match="format 7")
    path.write_text("{")
    _refused(capsys, checkpoint, match="cannot be read as JSON")


def test_probes_that_do_not_fit(checkpoint, capsys):
    _refused(capsys, checkpoint, "--period", 25, match="vocabulary too small")
    _refused(capsys, checkpoint, "--period", 20, "--repeats", 3, match="context shorter than the probe")
    _refused(capsys, checkpoint, "--steps", "3", match="no checkpoint at steps 3")
    _refused(capsys, checkpoint, "--scores", "copy", match="unknown scores 'copy'")
    _refused(capsys, checkpoint, "--device", "abacus", match="accepted: cpu, cuda")


def test_outputs_that_cannot_be_written_leave_what_was_there(checkpoint, tmp_path, capsys, monkeypatch):
    _refused(capsys, checkpoint, "--json", tmp_path / "none" / "x.json", match="there is no folder")
    _refused(capsys, checkpoint, "--json", tmp_path, match="is a folder")
    kept = tmp_path / "kept.json"
    kept.write_text("before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    _refused(capsys, checkpoint, "--json", kept, match="No space left on device")
    assert kept.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept.json", "model"]


def test_a_closed_pipe_is_no_error(checkpoint):
    command = f"{sys.executable} -m interp.cli {checkpoint} --quiet | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_values_out_of_range_are_named(checkpoint, tmp_path, capsys):
    _refused(capsys, checkpoint, "--seed", -1, match="seed -1; accepted: 0 or a positive number")
    _refused(capsys, checkpoint, "--seed", 10**23, match="accepted: 0 or a positive number")
    _refused(capsys, checkpoint, "--bos", 999, match="BOS 999; accepted: auto, none, or an id in 0..")
    _refused(capsys, checkpoint, "--bos", 10**23, match="accepted: auto, none, or an id in 0..")
    _refused(capsys, checkpoint, "--period", 1, match="a probe of 1 x 4 tokens is too short")
    _refused(capsys, checkpoint, "--period", 4, "--repeats", 2, match="period x (repeats - 1) of 5 or more")
    for device in ("meta", "mps"):
        _refused(capsys, checkpoint, "--device", device, match="accepted: cpu, cuda, cuda:N")
    _refused(capsys, checkpoint, "--scores", ",", match="unknown scores ''")
    _refused(capsys, checkpoint, "--steps", ",", match="steps ''")
    _refused(capsys, checkpoint, "--csv", f"{tmp_path / 'x.csv'}/", match="is a folder")
    _refused(capsys, checkpoint, "--csv", "", match="--csv ''; accepted: the name of a file to write, or -")


@pytest.mark.parametrize("kinds", [("json", "csv"), ("csv", "html"), ("json", "html")])
def test_two_outputs_are_never_one_file(checkpoint, tmp_path, capsys, monkeypatch, kinds):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("same")
    (tmp_path / "here").symlink_to(".")
    for first, second in (("same", "./same"), ("link", "same"), ("here/same", tmp_path / "same"), ("-", "-")):
        words = (f"--{kinds[0]}", first, f"--{kinds[1]}", second)
        _refused(capsys, checkpoint, *words, match=f"{second} is given for two outputs, --{kinds[0]} and")
    assert not (tmp_path / "same").exists()


def test_a_hyphen_is_stdout(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([str(checkpoint), "--quiet", "--json", "-", "--csv", "x.csv"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["format"] == 1 and "1 induction head: L1H0" in err and "wrote x.csv" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "x.csv"]


@pytest.mark.parametrize("stdout", ["closed", "full", "ascii"])
def test_files_stay_where_stdout_cannot_be_written(checkpoint, tmp_path, capsys, monkeypatch, stdout):
    file = tmp_path / "x.json"
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        patched.setattr(sys, "stdout", {"closed": None, "full": full, "ascii": ascii_only}[stdout])
        assert main([str(checkpoint), "--quiet", "--json", str(file)]) == (stdout != "ascii")
    said = {"closed": "stdout: closed", "full": "stdout: No space left on device"}.get(stdout)
    expected = f"wrote {file}\n" if said is None else f"detect-induction: error: {said}\n"
    assert capsys.readouterr().err == expected
    assert json.loads(file.read_text())["format"] == 1
    if said is None:
        assert b"L1H0" in ascii_only.buffer.getvalue() and b" ?0.0" in ascii_only.buffer.getvalue()


def test_text_for_a_model_without_tokenizer(checkpoint, tmp_path, capsys):
    _refused(capsys, checkpoint, "--text", tmp_path / "none", match="the model has no tokenizer")


def test_a_context_too_short_for_every_offset(tmp_path, capsys):
    config = induction_model().config.replace(n_ctx=9, positions="none", rope=None)
    folder = save_model(tmp_path / "short", LanguageModel(config))
    _refused(capsys, folder, match="context shorter than the probe: the model holds 9 tokens")


def test_a_model_that_no_memory_holds(checkpoint, capsys):
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "d_vocab": 10**13}))
    _refused(capsys, checkpoint, match="out of memory")


def test_links_are_followed_and_pipes_written_to(checkpoint, tmp_path, capsys):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert main([str(checkpoint), "--quiet", "--csv", str(tmp_path / "link"), "--json", os.devnull]) == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text().startswith("step")
    assert not os.path.isfile(os.devnull)


def test_damaged_lines_of_text(tmp_path):
    from interp.corpus import documents
    from interp.errors import DetectionError

    path = tmp_path / "text.jsonl"
    for line in ("{bad", "[1]", '{"foo": 1}', '{"text": 3}'):
        path.write_text('{"text": "good"}\n' + line + "\n")
        with pytest.raises(DetectionError, match="line 2 is .* accepted: a JSON object"):
            documents(path)


@pytest.mark.parametrize(("package", "options"), [("plotly", ["--html", "out.html"]), ("rich", [])])
def test_a_package_that_is_missing_is_named_before_the_work(
    checkpoint, tmp_path, capsys, monkeypatch, package, options
):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    _refused(capsys, checkpoint, *options, match=f"needs the package {package}, which is not installed")
    assert not (tmp_path / "out.html").exists()
