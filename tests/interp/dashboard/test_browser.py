"""The page in a real browser: every control does what it says, and two windows leave each other alone."""

import re
import shutil

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.xdist_group("browser")

HEADING = "#panel-attention .maps .side-{} .side-heading"
# Pixel of a data point of a plotly figure, scrolled into view.
PIXEL = """([id, axis, x, y]) => {
  const gd = document.querySelector(`#${id} .js-plotly-plot`);
  gd.scrollIntoView({block: "center"});
  const box = gd.getBoundingClientRect(), layout = gd._fullLayout;
  const across = layout["xaxis" + axis], down = layout["yaxis" + axis];
  return [box.left + across._offset + across.d2p(x), box.top + down._offset + down.d2p(y)];
}"""


def click_at(page, graph, x, y, axis=""):
    """A real click on a data point, once the graph stays where it is."""
    place, before = page.evaluate(PIXEL, [graph, axis, x, y]), None
    while place != before:
        page.wait_for_timeout(200)
        place, before = page.evaluate(PIXEL, [graph, axis, x, y]), place
    left, top = place
    page.mouse.move(left - 3, top - 1)
    page.mouse.move(left, top)
    page.wait_for_selector(f"#{graph} .hoverlayer .hovertext")
    page.mouse.click(left, top)


def choose(page, name, option):
    """An option of a drop-down list."""
    page.locator(f"#{name}").click()
    page.get_by_role("option", name=option, exact=True).click()


def heading(page, side="a"):
    return page.locator(HEADING.format(side))


def tab(page, name):
    page.get_by_role("tab", name=name).click()


def test_opens_on_the_induction_head_and_reads_its_target(wired_page, open_page):
    page = open_page(wired_page)
    expect(heading(page)).to_contain_text("step 40 · L1H2 · pattern")
    expect(page.locator("#prompt-status")).to_have_text("100 tokens, 25 different.")
    page.locator('#a-reads [data-position="60"]').click()
    sources = [35 + 1, 10 + 1]
    summary = page.locator("#a-text-summary")
    expect(summary).to_contain_text("@60 reads most from")
    read = {int(place) for place in re.findall(r"@(\d+) \(0\.5", summary.inner_text())}
    assert read == set(sources), summary.inner_text()
    marked = page.locator("#a-reads .target").evaluate_all("all => all.map(one => one.dataset.position)")
    assert sorted(map(int, marked)) == sorted(sources)


def test_another_head_reads_no_target(wired_page, open_page):
    page = open_page(wired_page)
    choose(page, "a-head", "1")
    expect(heading(page)).to_contain_text("L1H1")
    page.locator('#a-reads [data-position="60"]').click()
    # Even attention: each of 61 tokens gets 1/61.
    expect(page.locator("#a-text-summary")).to_contain_text("@60 reads most from")
    expect(page.locator("#a-text-summary")).to_contain_text("(0.016)")
    expect(page.locator("#a-reads-limits")).to_have_text("Colours from 0 to 0.016.")


def test_slider_moves_the_checkpoint_and_plays(wired_page, open_page):
    page = open_page(wired_page)
    page.locator("#a-step [role=slider]").focus()
    page.keyboard.press("Home")
    expect(heading(page)).to_contain_text("step 0 ·")
    expect(page.locator("#a-step-label")).to_have_text("step 0 (1 of 5)")
    page.locator("#a-play").click()
    expect(heading(page)).to_contain_text("step 5 ·")
    page.locator("#a-play").click()
    expect(page.locator("#a-play")).to_have_text("Play")


def test_arrow_keys_walk_over_the_tokens(wired_page, open_page):
    page = open_page(wired_page)
    page.locator('#a-reads [data-position="30"]').click()
    page.locator('#a-reads [data-position="30"][aria-pressed="true"]').focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator('#a-reads [data-position="31"]')).to_have_attribute("aria-pressed", "true")
    assert page.evaluate("document.activeElement.dataset.position") == "31"


def test_clicking_the_map_chooses_its_row(wired_page, open_page):
    page = open_page(wired_page)
    click_at(page, "a-map", 20, 70)
    expect(page.locator('#a-reads [data-position="70"]')).to_have_attribute("aria-pressed", "true")
    hover = page.locator("#a-map .hoverlayer .hovertext").text_content()
    assert "@70" in hover and "@20" in hover, hover


def test_comparison_of_two_checkpoints_shares_the_colours(wired_page, open_page):
    page = open_page(wired_page)
    assert not heading(page, "b").is_visible()
    page.get_by_label("Compare with a second map").check()
    page.locator("#b-step [role=slider]").focus()
    page.keyboard.press("Home")
    expect(heading(page, "b")).to_contain_text("step 0 · L1H2")
    expect(heading(page, "a")).to_contain_text("step 40 · L1H2")
    expect(page.locator("#b-map-caption")).to_contain_text("on both maps")
    assert page.locator("#b-map .heatmaplayer image").count() == 1


def test_comparison_of_two_models(wired_run, mamba_run, serve, open_page):
    with serve(wired_run, mamba_run) as address:
        page = open_page(address)
        choose(page, "b-layer", "1 · Mamba-1")
        expect(heading(page, "b")).to_contain_text("mixed · L1 · ssm")
        page.locator("#b-reading").get_by_label("block").check()
        expect(page.locator("#b-map-caption")).to_contain_text("share of contribution")
        # 13 tokens in one vocabulary, 32 in the other.
        status = page.locator("#prompt-status")
        expect(status).to_contain_text("A: 52 tokens, 13 different; only 13 different tokens")
        expect(status).to_contain_text("drawn from the 13 tokens that both models have.")
        expect(status).to_contain_text("Both read the same tokens.")
        expect(page.locator("#b-values")).to_be_hidden()
        page.locator("#b-reading").get_by_label("ssm").check()
        page.locator("#b-values").get_by_label("signed").check()
        expect(page.locator("#b-map-caption")).to_contain_text("implied attention, mean of channels, from −")
        choose(page, "b-units", "4 groups of channels")
        choose(page, "b-head", "group 3")
        expect(heading(page, "b")).to_contain_text("L1C3 · ssm")
        tab(page, "Recurrent state")
        expect(page.locator("#b-state-caption")).to_contain_text("group of channels")
        expect(page.locator("#a-state-caption")).to_contain_text("keys and values")
        assert page.locator("#b-state .scatterlayer .trace").count() == 4


def test_cuts_find_the_match_at_offset_one(wired_page, open_page):
    page = open_page(wired_page)
    tab(page, "Offsets and cuts")
    caption = page.locator("#a-cuts-caption")
    expect(caption).to_contain_text("Strongest at offset +1")
    effect = float(re.search(r"\+1: ([\d.]+) nats", caption.inner_text())[1])
    assert effect > 3, caption.inner_text()
    choose(page, "a-head", "0")
    expect(caption).to_contain_text("0.00 nats above")


def test_training_click_moves_the_checkpoint_and_chooses_a_head(wired_page, open_page):
    page = open_page(wired_page)
    tab(page, "Training")
    expect(page.locator("#a-training-caption")).to_contain_text("5 checkpoints", timeout=40_000)
    page.wait_for_selector("#a-phase .scatterlayer .trace", state="attached")
    place = page.evaluate(
        """() => {
          const drawn = document.querySelector("#a-phase .js-plotly-plot")._fullData;
          const curve = drawn.find((trace) => trace.name === "L1H2 pattern");
          const i = [...curve.customdata].indexOf(10);
          return [curve.x[i], curve.y[i]];
        }"""
    )
    click_at(page, "a-phase", *place)
    expect(page.locator("#a-step-label")).to_have_text("step 10 (3 of 5)")
    click_at(page, "a-prefix_matching", 3, 0)
    expect(page.locator("#panel-training .side-a .side-heading")).to_contain_text("step 10 · L0H3")


def test_two_windows_do_not_disturb_each_other(wired_page, open_page):
    one, two = open_page(wired_page), open_page(wired_page)
    choose(one, "a-head", "3")
    expect(heading(one)).to_contain_text("L1H3")
    one.locator("#a-step [role=slider]").focus()
    one.keyboard.press("Home")
    expect(heading(one)).to_contain_text("step 0 · L1H3")
    two.locator('#a-reads [data-position="60"]').click()
    expect(two.locator("#a-text-summary")).to_contain_text("@60 reads most from")
    expect(heading(two)).to_contain_text("step 40 · L1H2")
    expect(heading(one)).to_contain_text("step 0 · L1H3")


def test_a_checkpoint_that_is_deleted_is_named(wired_run, tmp_path, serve, open_page):
    run = tmp_path / "short-lived"
    shutil.copytree(wired_run, run)
    with serve(run) as address:
        page = open_page(address)
        shutil.rmtree(run / "step_00000020")
        page.locator("#a-step [role=slider]").focus()
        page.keyboard.press("ArrowLeft")
        caption = page.locator("#a-map-caption")
        expect(caption).to_contain_text("short-lived: the checkpoint of step 20 is gone")
        page.keyboard.press("ArrowRight")
        expect(caption).to_contain_text("100 tokens")


def test_checkpoints_written_later_come_with_the_next_window(wired_run, tmp_path, serve, open_page):
    run = tmp_path / "growing"
    shutil.copytree(wired_run, run)
    shutil.move(run / "step_00000040", tmp_path / "later")
    with serve(run) as address:
        before = open_page(address)
        expect(before.locator("#a-step-label")).to_have_text("step 20 (4 of 4)")
        shutil.move(tmp_path / "later", run / "step_00000040")
        after = open_page(address)
        expect(after.locator("#a-step-label")).to_have_text("step 40 (5 of 5)")
        expect(heading(after)).to_contain_text("growing · step 40")
        before.locator("#a-step [role=slider]").focus()
        before.keyboard.press("ArrowLeft")
        expect(heading(before)).to_contain_text("growing · step 10")


def test_cuts_of_a_large_model_are_measured_when_asked_for(wired_run, serve, open_page, monkeypatch):
    monkeypatch.setattr("interp.dashboard.desk.LARGE_WEIGHTS", 1000)
    with serve(wired_run) as address:
        page = open_page(address)
        tab(page, "Offsets and cuts")
        caption, button = page.locator("#a-cuts-caption"), page.get_by_role("button", name="Measure the cuts")
        expect(caption).to_contain_text("Not measured yet: this model has 1,097,728 weights")
        # What takes no time is there at once.
        expect(page.locator("#a-weights .main-svg").first).to_be_visible()
        button.click()
        expect(caption).to_contain_text("Strongest at offset +1")
        expect(button).to_be_hidden()
        choose(page, "a-head", "1")
        expect(caption).to_contain_text("Not measured yet")
        choose(page, "a-head", "2")
        expect(caption).to_contain_text("Strongest at offset +1")


@pytest.mark.parametrize("width", [1280, 1920])
def test_cards_are_aligned(wired_page, open_page, width):
    page = open_page(wired_page)
    page.set_viewport_size({"width": width, "height": 1000})
    page.wait_for_selector("#a-map .heatmaplayer image")
    card = "#panel-attention .{} .view.side-a"
    map_box, text_box = (page.locator(card.format(name)).bounding_box() for name in ("maps", "texts"))
    tabs = page.locator(".tabs").bounding_box()
    assert map_box["x"] == pytest.approx(tabs["x"], abs=1)
    # One over the other with the same edges, or side by side with the same ends.
    right = [box["x"] + box["width"] for box in (map_box, text_box, tabs)]
    assert right[1] == pytest.approx(right[2], abs=1)
    if width == 1280:
        assert text_box["x"] == pytest.approx(map_box["x"], abs=1)
        assert right[0] == pytest.approx(right[1], abs=1)
    else:
        assert right[0] < text_box["x"]


def test_light_and_dark(wired_page, open_page):
    page = open_page(wired_page, mode="dark")
    root = page.locator("html")
    expect(root).to_have_attribute("data-mode", "dark")
    paper = page.locator("#a-map .main-svg").first
    expect(paper).to_have_css("background-color", "rgb(21, 25, 31)")
    page.get_by_label("Light").check()
    expect(root).to_have_attribute("data-mode", "light")
    expect(paper).to_have_css("background-color", "rgb(255, 255, 255)")
    page.get_by_label("System").check()
    page.emulate_media(color_scheme="light")
    expect(root).to_have_attribute("data-mode", "light")
