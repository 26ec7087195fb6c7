"""The runner of case files: its lines, its counts and its exit status."""

import json
import shutil

import pytest
import torch
from mixer_cases import FOLDER
from safetensors import safe_open
from safetensors.torch import save_file

from experiments.cases import main


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mixers").mkdir()
    return tmp_path


def rewrite(source: str, target, *, header: dict | None = None, **tensors: torch.Tensor) -> None:
    """A copy of a case with changed tensors (under their names with _ for .) or header."""
    with safe_open(FOLDER / f"{source}.safetensors", "pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata() | (header or {})
    save_file(held | {name.replace("_", ".", 1): t for name, t in tensors.items()}, target, metadata=metadata)


def test_a_new_file_needs_no_index(folder, capsys):
    shutil.copy(FOLDER / "linear_elu_t7.safetensors", folder / "mixers" / "never_seen.safetensors")
    assert main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["never_seen", "passed"]
    assert lines[-1] == "1 passed, 0 failed, 0 not supported"


def test_failures_and_unsupported_cases(folder, capsys):
    mixers = folder / "mixers"
    shutil.copy(FOLDER / "conv_t1.safetensors", mixers)
    rewrite(
        "linear_elu_t7",
        mixers / "wrong_value.safetensors",
        out_o=torch.full((2, 7, 2, 3), 9.0, dtype=torch.float64),
    )
    rewrite("linear_elu_t7", mixers / "other_operator.safetensors", header={"operator": "hyena"})
    flags = {"feature": "elu_plus_one", "normalise": True, "eps": 0.0, "scale": 1.0, "dropout": 0.1}
    rewrite("linear_elu_t7", mixers / "other_flag.safetensors", header={"flags": json.dumps(flags)})
    flags = {"feature": "taylor", "normalise": True, "eps": 0.0, "scale": 1.0}
    rewrite("linear_elu_t7", mixers / "other_feature.safetensors", header={"flags": json.dumps(flags)})
    rewrite("linear_elu_t7", mixers / "other_input.safetensors", in_gate=torch.ones(1))
    rewrite("linear_elu_t7", mixers / "other_format.safetensors", header={"format_version": "2"})
    (mixers / "truncated.safetensors").write_bytes((FOLDER / "conv_t1.safetensors").read_bytes()[:700])
    assert main([str(folder)]) == 1
    *lines, counts = capsys.readouterr().out.splitlines()
    outcome = {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in lines}
    assert outcome["conv_t1"] == "passed"
    assert "inf" not in outcome["wrong_value"] and ", o, parallel)" in outcome["wrong_value"]
    assert outcome["truncated"].startswith("failed (truncated.safetensors: cannot be read")
    assert outcome["other_operator"] == "not supported (operator 'hyena')"
    assert outcome["other_flag"] == "not supported (flag 'dropout' of linear_attention)"
    assert outcome["other_feature"] == "not supported (feature map 'taylor')"
    assert outcome["other_input"] == "not supported (input 'gate')"
    assert outcome["other_format"] == "not supported (format_version 2, accepted is 1)"
    assert counts == "1 passed, 2 failed, 5 not supported"


def test_a_folder_without_cases(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "has neither mixers/ nor real_models/" in capsys.readouterr().err
    (tmp_path / "mixers").mkdir()
    assert main([str(tmp_path)]) == 1


def test_cases_that_lack_a_tensor_or_do_not_fit(folder, capsys):
    source, mixers = FOLDER / "conv_linear_no_bias_t7.safetensors", folder / "mixers"
    with safe_open(source, "pt") as file:
        held, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    for name in ("in.weight", "out.o", "cot.o"):
        save_file({k: t for k, t in held.items() if k != name}, mixers / f"no_{name}.safetensors", metadata)
    save_file({**held, "grad.x": torch.ones(1)}, mixers / "shape.safetensors", metadata)
    assert main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert out.count("failed (does not run") == 4 and out.endswith("0 passed, 4 failed, 0 not supported\n")


def test_folders_without_cases_and_damaged_references(folder, capsys):
    assert main([str(folder)]) == 1
    assert capsys.readouterr().err == f"cases: {folder} holds no case; accepted: mixers/*.safetensors\n"
    tiny = folder / "real_models" / "tiny"
    tiny.mkdir(parents=True)
    missing = '{"cases": [{"architecture": "gpt2", "case": "x.safetensors"}]}'
    for text in ("{", "[]", '{"a": 1}', missing):
        (tiny / "cases.json").write_text(text)
        assert main([str(folder)]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "cannot be used" in err
