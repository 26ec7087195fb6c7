"""Imports run one way, kernels -> models -> interp -> experiments, and none is made before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernels", "models", "interp", "experiments")
# What each package may import of the others.
ALLOWED = {package: PACKAGES[: i + 1] for i, package in enumerate(PACKAGES)}
# kernels works where nothing else is installed.
KERNELS_NEED = {"torch", "triton", "jaxtyping"}


def imported(source: str, package: str) -> list[tuple[int, str]]:
    """Line and module of every import in some Python source, wherever it stands."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.lineno, node.module if node.level == 0 else package))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if node.args and isinstance(node.args[0], ast.Constant):
                found.append((node.lineno, node.args[0].value))
    return found


def wrong_arrows(source: str, package: str) -> list[str]:
    return [
        f"line {line} imports {module}"
        for line, module in imported(source, package)
        if module.split(".")[0] in PACKAGES and module.split(".")[0] not in ALLOWED[package]
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, package
    wrong = {str(f.relative_to(ROOT)): w for f in files if (w := wrong_arrows(f.read_text(), package))}
    assert wrong == {}


def test_a_wrong_arrow_is_found():
    for source in (
        "import interp",
        "def f():\n    from interp import detect",
        "import importlib\nimportlib.import_module('experiments.train')",
        "if True:\n    import torch, interp.cli as cli",
    ):
        assert wrong_arrows(source, "models"), source
    assert wrong_arrows("import kernels, models.config\nfrom interpreter import x", "models") == []


def test_kernels_import_torch_and_triton_only():
    standard = sys.stdlib_module_names
    for file in sorted((ROOT / "kernels").rglob("*.py")):
        for line, module in imported(file.read_text(), "kernels"):
            top = module.split(".")[0]
            assert top in KERNELS_NEED | {"kernels"} or top in standard, (
                f"{file.name}:{line} imports {module}"
            )


def test_nothing_imports_the_tests():
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            assert all(m.split(".")[0] != "tests" for _, m in imported(file.read_text(), package)), file


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-800:]
    return done.stdout.strip()


def test_the_kernels_package_is_ours_even_after_transformers():
    code = "import {first}, kernels; print(kernels.__file__); kernels.KernelError"
    for first in ("sys", "transformers"):
        assert run(code.format(first=first)) == str(ROOT / "kernels" / "__init__.py")


def test_importing_models_alone_is_light():
    heavy = run(
        "import models, models.errors, models.config, sys; print([m for m in ('torch', "
        "'transformer_lens', 'transformers') if m in sys.modules])"
    )
    assert heavy == "[]"


def test_models_work_without_transformer_lens():
    """A machine that only trains: hooks are refused, the rest works."""
    code = """
import importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transformer_lens" else real(name, *rest)
sys.path.insert(0, "tests")
import language_models, torch
from models import ConfigError
for name in ("gpt2", "hybrid"):
    model = language_models.build(name)
    tokens = language_models.tokens()
    model(tokens, return_type="loss").backward()
    assert torch.allclose(model(tokens), model(tokens, form="parallel"))
    model.generate(tokens, 2)
    try:
        model.run_with_cache(tokens)
    except ConfigError as error:
        message = str(error)
assert "transformer_lens" not in sys.modules
print(message)
"""
    assert run(code) == "hooks and caches need transformer_lens, which is not installed here"
