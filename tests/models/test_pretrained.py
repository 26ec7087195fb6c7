"""Foreign models in our own mixers: logits, maps, caches and hooks, against Hugging Face's eager models."""

from pathlib import Path

import hf_models
import pytest
import torch
from safetensors.torch import load_file

from models.errors import HookNotFired
from models.form import Form
from models.pretrained import from_pretrained, to_pretrained

TINY = Path(__file__).parents[1] / "cases" / "real_models" / "tiny"
# The bound: difference over the largest logit.
RELATIVE = 1e-4


def _tokens(n: int = 37) -> torch.Tensor:
    return torch.randint(0, hf_models.VOCAB, (2, n), generator=torch.Generator().manual_seed(1))


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def _hf(folder: Path):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """name -> (Hugging Face model, ours), made once."""
    made = {}

    def get(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp("hf")
            hf = hf_models.VARIANTS[name]()
            hf.save_pretrained(folder)
            made[name] = (hf, from_pretrained(folder), folder)
        return made[name]

    return get


@pytest.mark.parametrize("name", ["gpt2", "llama", "mamba"])
@torch.no_grad()
def test_tiny_case(name):
    case = load_file(TINY / f"{name}.case.safetensors")
    model = from_pretrained(TINY / name)
    for form in Form:
        torch.testing.assert_close(model(case["input_ids"], form=form), case["logits"], atol=1e-4, rtol=1e-5)
    maps = [key for key in case if key.startswith("attentions.")]
    assert len(maps) == (0 if name == "mamba" else 2)
    if maps:
        _, cache = model.run_with_cache(case["input_ids"])
        for key in maps:
            torch.testing.assert_close(cache["pattern", int(key[-1])], case[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", hf_models.VARIANTS)
@torch.no_grad()
def test_logits_and_maps_equal(name, loaded):
    hf, model, _ = loaded(name)
    tokens = _tokens()
    softmax = not name.startswith("mamba")
    theirs = hf(tokens, output_attentions=True) if softmax else hf(tokens)
    for form in Form:
        assert _apart(model(tokens, form=form), theirs.logits) < RELATIVE / 10
    if softmax:
        _, cache = model.run_with_cache(tokens)
        for layer, attention in enumerate(theirs.attentions):
            torch.testing.assert_close(cache["pattern", layer], attention, atol=2e-6, rtol=0)


@torch.no_grad()
def test_a_setting_that_is_ignored_would_show(loaded, tmp_path):
    """The control: each variant differs from its family's default by far more than the bound."""
    tokens = _tokens()
    for name in hf_models.VARIANTS:
        # Dynamic scaling leaves sequences within the context as they are.
        if name in ("gpt2", "gpt_neox", "llama", "mamba", "mamba2 two groups", "llama rope dynamic"):
            continue
        family = name.split()[0]
        default = next(key for key in hf_models.VARIANTS if key.split()[0] == family)
        assert _apart(loaded(name)[1](tokens), loaded(default)[0](tokens).logits) > 100 * RELATIVE


@pytest.mark.parametrize(
    "name", ["gpt2", "gpt_neox", "llama rope yarn", "mamba biases, untied", "mamba2 two groups"]
)
@torch.no_grad()
def test_state_continues_like_the_whole(name, loaded):
    hf, model, _ = loaded(name)
    tokens = _tokens(29)
    whole = hf(tokens).logits
    logits, state = model.prefill(tokens[:, :17])
    assert _apart(logits, whole[:, :17]) < RELATIVE / 10
    for t in range(17, 29):
        logits, state = model.step(tokens[:, t], state)
        assert _apart(logits, whole[:, t]) < RELATIVE / 10


EXPORTED = [name for name in hf_models.VARIANTS if "limits" not in name]


@pytest.mark.parametrize("name", EXPORTED)
@torch.no_grad()
def test_round_trip_is_exact(name, loaded, tmp_path):
    hf, model, folder = loaded(name)
    to_pretrained(tmp_path / "out", model)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(before) == set(after)
    for key in before:
        assert torch.equal(before[key], after[key])
    again = from_pretrained(tmp_path / "out")
    assert torch.equal(again(_tokens()), model(_tokens()))
    assert _apart(_hf(tmp_path / "out")(_tokens()).logits, hf(_tokens()).logits) < RELATIVE / 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_weights_are_computed_in_float32(dtype, tmp_path):
    hf = hf_models.llama().to(dtype)
    hf.save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.source.stored_dtype == str(dtype).removeprefix("torch.")
    assert model.source.dtype == "float32"
    # Not hf.float(): its rotary frequencies were rounded with the weights.
    assert _apart(model(_tokens()), _hf(tmp_path)(_tokens()).logits) < RELATIVE / 10
    assert from_pretrained(tmp_path, dtype=dtype).cfg.dtype == dtype


@torch.no_grad()
def test_sharded_weights_and_their_hash(loaded, tmp_path):
    hf, model, _ = loaded("gpt_neox")
    hf.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sharded = from_pretrained(tmp_path)
    assert torch.equal(sharded(_tokens()), model(_tokens()))
    # The hash is of the tensors, not of the files.
    assert sharded.source.weight_sha256 == model.source.weight_sha256
    assert sharded.source.weight_sha256 != loaded("gpt2")[1].source.weight_sha256


def test_source_says_what_the_files_say(loaded):
    source = loaded("llama biases, tied")[1].source
    assert (source.architecture, source.format, source.tied, source.norm_folding) == (
        "llama",
        "safetensors",
        True,
        "none",
    )
    assert (source.bos, source.adds_bos, source.tokenizer) == (0, None, "none: no tokenizer.json")


@pytest.mark.parametrize("name", ["mamba", "mamba2 two groups"])
@torch.no_grad()
def test_hooks_on_a_loaded_mamba_fire_and_are_used(name, loaded):
    """TransformerLens's bridge loses its inner hooks here: interventions become silent no-ops."""
    _, model, _ = loaded(name)
    tokens = _tokens()
    plain = model(tokens, form=Form.PARALLEL)
    _, cache = model.run_with_cache(tokens)
    for point in ("conv", "q", "k", "v", "dt", "gate", "z", "pattern"):
        hook = f"blocks.1.attn.hook_{point}"
        assert hook in cache and cache[hook].abs().max() > 0
        changed = model.run_with_hooks(tokens, fwd_hooks=[(hook, lambda x, hook: x * 0.5)])
        assert (changed - plain).abs().max() > 1e-3, hook
    same = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_pattern", lambda x, hook: x * 1.0)])
    torch.testing.assert_close(same, plain)
    with pytest.raises(HookNotFired, match="recurrent"):
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_state", lambda x, hook: x)])
