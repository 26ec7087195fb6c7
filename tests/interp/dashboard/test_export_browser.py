"""The exported page in a real browser, from the file and offline: it opens, switches and fetches nothing."""

import json
import re

import pytest
from playwright.sync_api import expect

from interp.dashboard.export import export_page

pytestmark = pytest.mark.xdist_group("browser")
# No line ends: a prompt is one argument; `visible` of each is tested with the figures.
NASTY = "</script><script>window.bad=1</script>\"'& שלום 🙂\n\tab ab ab"


@pytest.fixture(scope="module")
def pages(wired_run, text_run, mamba_run, tmp_path_factory):
    """One page for each run; bytes of the text prompt are fragments of characters."""
    folder = tmp_path_factory.mktemp("exported")
    one, nasty = ["1 2 3 1 2 3 1 2"], ["ab ab ab", "é🙂", NASTY[:44], "\u202eאב\n\t<b>"]
    # Few heads: what takes time is cutting their edges.
    for name, runs, prompts, heads in (
        ("wired", [wired_run], (), "L1H1,L1H2,L0H2,L0H3"),
        ("text", [text_run], nasty, None),
        ("mamba", [mamba_run], one, None),
        ("two", [wired_run, mamba_run], one, None),
    ):
        export_page([str(run) for run in runs], folder / f"{name}.html", prompts=prompts, heads=heads)
    return {path.stem: path.as_uri() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def offline(browser):
    """One profile without a network for all pages."""
    found = browser.new_context(viewport={"width": 1280, "height": 1000}, offline=True, color_scheme="light")
    found.set_default_timeout(15_000)
    yield found
    found.close()


@pytest.fixture
def open_file(offline, pages):
    """Opens a page without a network; at the end nothing may have failed or been asked for."""
    opened, wrong = [], []

    def watch(request):
        if not request.url.startswith(("file:", "data:", "blob:")):
            wrong.append(f"request to {request.url}")

    def open_at(name, *, mode="light", width=1280):
        page = offline.new_page()
        opened.append(page)
        page.set_viewport_size({"width": width, "height": 1000})
        page.emulate_media(color_scheme=mode)
        page.on("request", watch)
        page.on("pageerror", lambda error: wrong.append(f"script error: {error}"))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.goto(pages[name])
        page.wait_for_selector("#map .heatmaplayer image")
        return page

    yield open_at
    for page in opened:
        page.close()
    assert wrong == [], json.dumps(wrong, indent=1)


def cell(page, dest, src, map="map"):
    return page.evaluate("([id, i, j]) => document.getElementById(id).data[0].z[i][j]", [map, dest, src])


def top(page, map="map"):
    """Upper end of a map's colours."""
    return page.evaluate("(id) => document.getElementById(id).data[0].zmax", map)


def test_opens_on_the_induction_head_with_its_numbers(open_file):
    page = open_file("wired")
    expect(page.locator("#heading")).to_have_text(re.compile("step 40 · L1H2 · pattern"))
    assert cell(page, 60, 36) == pytest.approx(0.5, abs=0.01) and cell(page, 36, 60) is None
    expect(page.locator("#map-caption")).to_contain_text("100 tokens. Colours: attention, from 0 to")
    expect(page.locator("#cut-caption")).to_contain_text("Strongest at offset +1")
    for plot in ("weight", "cut", "phase", "state"):
        expect(page.locator(f"#{plot} .main-svg").first).to_be_visible()


def test_another_head_layer_and_checkpoint(open_file):
    page = open_file("wired")
    page.select_option("#unit", label="L1H1")
    expect(page.locator("#heading")).to_contain_text("L1H1")
    # Even attention over 61 tokens.
    assert cell(page, 60, 36) == pytest.approx(1 / 61, abs=1e-3)
    page.select_option("#unit", label="L1H2")
    page.locator("#step").focus()
    page.keyboard.press("Home")
    expect(page.locator("#heading")).to_contain_text("step 0 ·")
    expect(page.locator("#step-label")).to_have_text("step 0 (1 of 5)")
    assert cell(page, 60, 36) < 0.1
    cursor = "document.getElementById('phase').layout.shapes.at(-1).x0"
    first = page.evaluate(cursor)
    page.keyboard.press("End")
    assert page.evaluate(cursor) > first
    page.select_option("#layer", index=0)
    expect(page.locator("#heading")).to_contain_text("L0H2")


def test_play_goes_through_the_checkpoints(open_file):
    page = open_file("wired")
    page.locator("#play").click()
    expect(page.locator("#play")).to_have_text("Pause")
    expect(page.locator("#heading")).to_contain_text("step 0 ·")
    expect(page.locator("#heading")).to_contain_text("step 40 ·")
    expect(page.locator("#play")).to_have_text("Play")


def test_a_token_is_clicked_and_moved_from(open_file):
    page = open_file("wired")
    page.locator('#reads [data-position="60"]').click()
    expect(page.locator("#summary")).to_contain_text("@60 reads most from")
    read = {int(place) for place in re.findall(r"@(\d+) \(0\.5", page.locator("#summary").inner_text())}
    assert read == {36, 11}
    marked = page.locator("#reads .target").evaluate_all(
        "all => all.map((one) => Number(one.dataset.position))"
    )
    assert sorted(marked) == [11, 36]
    page.locator('#reads [data-position="60"]').focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#summary")).to_contain_text("@61 reads most from")
    page.locator('#read-by [data-position="36"]').click()
    back = page.locator("#read-by .target").evaluate_all(
        "all => all.map((one) => Number(one.dataset.position))"
    )
    assert 60 in back
    page.uncheck("#targets")
    expect(page.locator(".target")).to_have_count(0)


def test_a_click_on_the_map_chooses_its_row(open_file):
    page = open_file("wired")
    left, top = page.evaluate(
        """() => { const map = document.getElementById("map"); map.scrollIntoView({block: "center"});
        const box = map.getBoundingClientRect(), { xaxis, yaxis } = map._fullLayout;
        return [box.left + xaxis._offset + xaxis.d2p(20), box.top + yaxis._offset + yaxis.d2p(80)]; }"""
    )
    page.mouse.move(left - 3, top - 1)
    page.mouse.move(left, top)
    page.wait_for_selector("#map .hoverlayer .hovertext")
    page.mouse.click(left, top)
    expect(page.locator("#summary")).to_contain_text("@80 reads most from")


def test_a_click_on_a_curve_and_on_a_matrix_choose(open_file):
    page = open_file("wired")
    page.evaluate("document.getElementById('phase').emit('plotly_click', { points: [{ customdata: 12 }] })")
    expect(page.locator("#heading")).to_contain_text("step 10 ·")
    matrix = "document.querySelector('.matrices:not([hidden]) .plot')"
    page.evaluate(f"{matrix}.emit('plotly_click', {{ points: [{{ customdata: 0, x: 3 }}] }})")
    expect(page.locator("#heading")).to_contain_text("L0H3")


def test_readings_of_mamba(open_file):
    page = open_file("mamba")
    page.select_option("#layer", index=1)
    expect(page.locator("#heading")).to_contain_text("· L1 ·")
    page.select_option("#reading", value="ssm, signed")
    expect(page.locator("#map-caption")).to_contain_text("from −")
    assert page.evaluate("document.getElementById('map').data[0].zmin") < 0
    page.select_option("#reading", value="block")
    assert page.evaluate("document.getElementById('map').data[0].zmin") == 0
    expect(page.locator("#training-section")).to_be_hidden()


def test_prompts_are_switched_and_their_text_does_nothing(open_file):
    page = open_file("text")
    labels = page.locator("#prompt option").all_inner_texts()
    assert len(labels) == 4 and any("</script>" in label for label in labels)
    page.select_option("#prompt", index=1)
    # é and the smiling face are two and four bytes, each a token of its own.
    expect(page.locator("#reads button")).to_have_count(6)
    expect(page.locator("#reads button").first).to_have_text("⟨C3⟩")
    page.select_option("#prompt", index=2)
    assert page.locator("#reads").inner_text().replace("\n", "").startswith("</script")
    page.select_option("#prompt", index=3)
    assert page.evaluate("window.bad") is None
    assert page.locator("#reads b, #reads script, #map b, #prompt-note b").count() == 0
    assert "↵" in page.locator("#reads").inner_text() and "⇥" in page.locator("#reads").inner_text()


def test_colours_to_the_percentile_say_so(open_file):
    page = open_file("wired")
    # Even attention: row i holds 1 / (i + 1), so the first nine rows and half of the tenth lie beyond.
    page.select_option("#unit", label="L1H1")
    page.select_option("#contrast", value="99")
    expect(page.locator("#map-caption")).to_contain_text("The largest weight is 1.000; those beyond have the")
    assert page.evaluate("document.getElementById('map').data[0].zmax") == pytest.approx(0.1, abs=0.001)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_follows_the_systems_mode_and_the_button(open_file, mode):
    page = open_file("wired", mode=mode)
    ground = "document.getElementById('map').layout.paper_bgcolor"
    colours = {"light": "#ffffff", "dark": "#15191f"}
    assert page.evaluate(ground) == colours[mode]
    page.locator("#mode").click()
    assert page.evaluate(ground) == colours["dark" if mode == "light" else "light"]
    assert cell(page, 60, 36) == pytest.approx(0.5, abs=0.01)


def test_two_checkpoints_side_by_side_share_their_colours(open_file):
    page = open_file("wired")
    expect(page.locator("#map-b")).to_be_hidden()
    expect(page.locator("#model")).to_be_hidden()
    page.get_by_label("Compare with a second map").check()
    page.locator("#step-b").focus()
    page.keyboard.press("Home")
    expect(page.locator("#map-heading-b")).to_contain_text("step 0 · L1H2 · pattern")
    expect(page.locator("#map-heading")).to_contain_text("step 40 · L1H2 · pattern")
    assert cell(page, 60, 36) == pytest.approx(0.5, abs=0.01) and cell(page, 60, 36, "map-b") < 0.1
    assert top(page) == top(page, "map-b") == 1
    # Even attention from the tenth row on reaches to 0.1 at most, and on both maps all the same.
    page.select_option("#unit-b", label="L1H1")
    page.select_option("#contrast", value="99")
    expect(page.locator("#map-caption-b")).to_contain_text("on both maps. The largest weight is 1.000")
    assert top(page) == top(page, "map-b") < 1
    # One choice of a token for both.
    page.locator('#reads-b [data-position="60"]').click()
    expect(page.locator("#summary")).to_contain_text("@60 reads most from")
    expect(page.locator("#summary-b")).to_contain_text("(0.016)")
    cursors = "document.getElementById('phase').layout.shapes.slice(-2).map((one) => one.line.dash)"
    assert page.evaluate(cursors) == ["dot", "solid"]
    expect(page.locator("#training-b")).to_be_hidden()
    for part in ("cut-b", "state-b", "weight-b"):
        expect(page.locator(f"#{part} .main-svg").first).to_be_visible()
    page.get_by_label("Compare with a second map").uncheck()
    expect(page.locator("#map-b")).to_be_hidden()


def test_two_models_side_by_side(open_file):
    page = open_file("two")
    expect(page.locator("#map-heading-b")).to_contain_text("B mixed · ")
    expect(page.locator("#prompt-note")).to_contain_text("Both read the same tokens.")
    page.select_option("#layer-b", label="1 · Mamba-1")
    expect(page.locator("#map-caption-b")).to_contain_text("share of contribution")
    page.select_option("#reading-b", value="ssm, signed")
    expect(page.locator("#map-caption-b")).to_contain_text("from −")
    expect(page.locator("#map-caption")).to_contain_text("attention, from 0 to 1.000.")
    expect(page.locator("#reads-b button")).to_have_count(8)
    expect(page.locator("#training")).to_be_visible()
    expect(page.locator("#training-b")).to_be_hidden()
    # The other way round: B's model with checkpoints, A's without.
    page.select_option("#model", label="mixed")
    page.select_option("#model-b", index=0)
    expect(page.locator("#map-heading-b")).to_contain_text("step 40 · L1H2 · pattern")
    expect(page.locator("#steps")).to_be_hidden()
    expect(page.locator("#training-b .main-svg").first).to_be_visible()
    expect(page.locator("#training")).to_be_hidden()
    page.evaluate("document.getElementById('phase-b').emit('plotly_click', { points: [{ customdata: 12 }] })")
    expect(page.locator("#map-heading-b")).to_contain_text("step 10 · L1H2")


@pytest.mark.parametrize("name, width", [("wired", 420), ("wired", 1280), ("wired", 1920), ("two", 420),
                                         ("two", 1280), ("two", 1920)])  # fmt: skip
def test_fits_the_window(open_file, name, width):
    page = open_file(name, width=1000)
    page.set_viewport_size({"width": width, "height": 1000})
    expect(page.locator("#map .heatmaplayer image")).to_be_visible()
    # The maps are drawn anew for the width; then nothing may stand out to the right.
    page.wait_for_function(
        """() => document.documentElement.scrollWidth <= window.innerWidth &&
        [...document.querySelectorAll(".plot .main-svg")].every(
          (svg) => svg.clientWidth <= svg.closest(".plot").clientWidth)"""
    )


def labels(page, map):
    """How many tokens are named along each axis, and how many pairs of neighbours are closer than a line."""
    return page.evaluate(
        """(id) => ["x2tick", "y2tick"].map((axis) => {
          const there = [...document.querySelectorAll(`#${id} .${axis} text`)];
          const boxes = there.map((text) => text.getBoundingClientRect());
          const close = boxes.slice(1).filter((box, k) => Math.hypot(
            box.x + box.width / 2 - boxes[k].x - boxes[k].width / 2,
            box.y + box.height / 2 - boxes[k].y - boxes[k].height / 2) < 10);
          return [boxes.length, close.length];
        })""",
        map,
    )


def test_labels_of_two_maps_do_not_run_into_each_other(open_file):
    page = open_file("text")
    page.select_option("#prompt", index=2)
    assert labels(page, "map") == [[46, 0], [46, 0]]
    page.check("#compare")
    expect(page.locator("#map-b .heatmaplayer image")).to_be_visible()
    page.wait_for_function("document.getElementById('map').layout.width < 560")
    for map in ("map", "map-b"):
        assert labels(page, map) == [[16, 0], [16, 0]], map


def test_dark_comparison_is_dark_on_both_sides(open_file):
    page = open_file("two", mode="dark")
    for map in ("map", "map-b"):
        assert page.evaluate("(id) => document.getElementById(id).layout.paper_bgcolor", map) == "#15191f"
