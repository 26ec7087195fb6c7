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
    """A real click on a data point."""
    left, top = page.evaluate(PIXEL, [graph, axis, x, y])
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
