"""Runs with a known circuit, a served page, and a browser that must stay on this machine."""

import json
import shutil
import threading
from contextlib import contextmanager

import pytest
import torch

from models.checkpoint import save_model
from models.config import LanguageModelConfig, Mamba1Config, SoftmaxAttentionConfig
from models.constructed import INDUCTION_HEAD, constructed_model
from models.language_model import LanguageModel

# How much of the matching head's query is there at each step: induction appears between 10 and 20.
STRENGTH = {0: 0.0, 5: 0.0, 10: 0.05, 20: 1.0, 40: 1.0}
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def wired_run(tmp_path_factory):
    """Checkpoints of the hand-wired softmax model, whose induction head (layer 1) grows sharp."""
    folder = tmp_path_factory.mktemp("wired")
    for step, strength in STRENGTH.items():
        model, circuit = constructed_model("softmax", n_ctx=128)
        q = model.blocks[circuit.layer].attn.in_proj.weight.view(3, 4, 128, -1)[0]
        with torch.no_grad():
            q[INDUCTION_HEAD] *= strength
        save_model(folder / f"step_{step:08d}", model)
    return folder


@pytest.fixture(scope="session")
def text_run(tmp_path_factory):
    """One checkpoint that reads bytes, with 48 learned positions."""
    from tokenizers import Tokenizer

    from experiments.tokenizer import byte_tokenizer_json

    config = LanguageModelConfig(
        d_model=16,
        n_layers=1,
        d_vocab=256,
        n_ctx=48,
        mixers=(SoftmaxAttentionConfig(n_heads=2),),
        positions="learned",
        init_std=0.3,
    )
    model = LanguageModel(config, tokenizer=Tokenizer.from_str(byte_tokenizer_json()))
    return save_model(tmp_path_factory.mktemp("text") / "bytes", model)


@pytest.fixture(scope="session")
def mamba_run(tmp_path_factory):
    """One checkpoint with a Mamba-1 layer above a softmax one."""
    config = LanguageModelConfig(
        d_model=16, n_layers=2, d_vocab=13, n_ctx=64,
        mixers=(SoftmaxAttentionConfig(n_heads=2), Mamba1Config(d_state=4, d_inner=8)), init_std=0.3,
    )  # fmt: skip
    return save_model(tmp_path_factory.mktemp("mamba") / "mixed", LanguageModel(config))


@contextmanager
def served(*paths):
    """The address of a page for these paths, served by this process on a free port."""
    from interp.dashboard.app import make_app
    from interp.dashboard.desk import Desk
    from interp.dashboard.server import serve_on, url

    server = serve_on(make_app(Desk([str(path) for path in paths])).server, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield url("127.0.0.1", server.port)
    finally:
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def serve():
    return served


@pytest.fixture(scope="session")
def wired_page(wired_run):
    with served(wired_run) as address:
        yield address


@pytest.fixture(scope="session")
def text_page(text_run):
    with served(text_run) as address:
        yield address


@pytest.fixture(scope="session")
def browser():
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    from playwright.sync_api import expect, sync_playwright

    # A loaded machine draws slowly: waiting longer costs nothing where it does not.
    expect.set_options(timeout=20_000)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="session")
def context(browser):
    """One profile for all pages: scripts are read from its cache after the first."""
    found = browser.new_context(viewport={"width": 1280, "height": 1000}, color_scheme="light")
    found.set_default_timeout(15_000)
    yield found
    found.close()


@pytest.fixture
def open_page(context):
    """Opens pages; at the end no page may have said an error or asked another host for anything."""
    pages, wrong = [], []

    def watch_request(request):
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            wrong.append(f"request to {request.url}")

    def open_at(address, *, mode="light"):
        page = context.new_page()
        pages.append(page)
        page.emulate_media(color_scheme=mode)
        page.on("request", watch_request)
        page.on("pageerror", lambda error: wrong.append(f"script error: {error}"))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.goto(address)
        page.wait_for_selector("#a-map .heatmaplayer image")
        return page

    yield open_at
    for page in pages:
        page.close()
    assert wrong == [], json.dumps(wrong, indent=1)
