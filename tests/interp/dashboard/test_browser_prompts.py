"""Prompts in a real browser: hostile text stays text, and what cannot be read is said."""

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.xdist_group("browser")


def read(page, text):
    """Type a prompt and read it."""
    page.get_by_label("Type your own").check()
    page.locator("#prompt-text").fill(text)
    page.get_by_role("button", name="Read it").click()


def tokens(page):
    return page.locator("#a-reads .token").all_text_contents()


def test_hostile_text_is_shown_as_it_is(text_page, open_page):
    page = open_page(text_page)
    text = "<script>x()</script>\"'&<b>\n$1$"
    read(page, text)
    expect(page.locator("#prompt-status")).to_contain_text(f"{len(text)} tokens")
    expect(page.locator("#a-reads .token")).to_have_count(len(text))
    assert "".join(tokens(page)) == text.replace("\n", "↵")
    assert page.locator("#a-reads b, #a-reads script, #a-map b").count() == 0
    assert page.locator("#a-reads br").count() == 1
    page.locator('#a-reads [data-position="24"]').click()
    expect(page.locator("#a-text-summary")).to_contain_text("@24 reads most from")
    assert page.locator('#a-reads [data-position="24"]').get_attribute("title") is not None


def test_right_to_left_and_emoji_are_bytes_with_names(text_page, open_page):
    page = open_page(text_page)
    read(page, "ש🙂 a")
    expect(page.locator("#a-reads .token")).to_have_count(8)
    named = ["⟨D7⟩", "⟨A9⟩", "⟨F0⟩", "⟨9F⟩", "⟨99⟩", "⟨82⟩", "␣", "a"]
    assert tokens(page) == named
    expect(page.locator("#a-map .x2tick text")).to_have_text(named)


def test_too_long_empty_and_again_good(text_page, open_page):
    page = open_page(text_page)
    status, caption = page.locator("#prompt-status"), page.locator("#a-map-caption")
    read(page, "x" * 49)
    expect(status).to_have_text("The prompt has 49 tokens; the positions that the model has learned: 48.")
    expect(caption).to_contain_text("49 tokens")
    read(page, "")
    expect(status).to_have_text("The prompt is empty: type some text.")
    expect(status).to_have_class("status error")
    read(page, "x" * 48)
    expect(status).to_have_text("48 tokens, 1 different.")
    expect(status).to_have_class("status")


def test_a_text_of_megabytes_is_refused_in_words(text_page, open_page):
    page = open_page(text_page)
    status = page.locator("#prompt-status")
    page.locator("#prompt-kind").get_by_label("Type your own").check()
    box = page.locator("#prompt-text")
    hint = page.locator("#prompt-typed-fields small")
    expect(hint).to_have_text("At most 48 tokens and 131,072 characters.")
    for text in ("x" * 5_000_000, "\U0001f642" * 131_073):
        box.fill("ab")
        page.locator("#prompt-read").click()
        expect(status).to_contain_text("2 tokens")
        box.fill(text)
        page.locator("#prompt-read").click()
        expect(status).to_have_text("The text has more than 131,072 characters, the most accepted.")
    # As many as are accepted: only the tokens are too many.
    box.fill("\U0001f642" * 131_072)
    page.locator("#prompt-read").click()
    expect(status).to_contain_text("524,288 tokens")


def test_ids_where_there_is_no_tokenizer(wired_page, open_page):
    page = open_page(wired_page)
    status = page.locator("#prompt-status")
    read(page, "3, 1 4 99 1 5")
    expect(status).to_have_text("Unknown token 99: the vocabulary has ids 0 to 31.")
    read(page, "3 <b>one</b>")
    expect(status).to_contain_text("not '<b>one</b>'.")
    read(page, "7 8 9 7")
    expect(page.locator("#a-reads .token")).to_have_count(4)
    page.locator('#a-reads [data-position="3"]').click()
    # The induction head reads the 8 that followed the earlier 7.
    expect(page.locator("#a-text-summary")).to_contain_text("‘7’ @3 reads most from ‘8’ @1 (1.000)")


def test_a_run_without_samples_says_so(wired_page, open_page):
    page = open_page(wired_page)
    page.get_by_label("Held-out sample").check()
    expect(page.locator("#prompt-status")).to_contain_text("neither held-out windows nor a tokenizer")


def test_zooming_into_a_long_prompt_shows_single_cells(mamba_run, serve, open_page):
    with serve(mamba_run) as address:
        page = open_page(address)
        page.locator("#prompt-repeats").fill("50")
        page.keyboard.press("Enter")
        expect(page.locator("#a-map-caption")).to_contain_text("Each cell stands for 2 × 2 positions")
        cells = """() => {
          const gd = document.querySelector("#a-map .js-plotly-plot"), z = gd._fullData[0].z;
          return [z.length, z[0].length, gd._fullLayout.xaxis2.tickvals.length];
        }"""
        assert page.evaluate(cells)[:2] == [325, 325]
        box = page.locator("#a-map .nsewdrag").first.bounding_box()
        left, low = box["x"], box["y"] + box["height"]
        page.mouse.move(left + 10, low - 110)
        page.mouse.down()
        page.mouse.move(left + 110, low - 10, steps=4)
        page.mouse.up()
        page.wait_for_timeout(50)
        expect(page.locator("#a-map .x2tick").nth(4)).to_be_attached()
        rows, columns, ticks = page.evaluate(cells)
        assert 60 < rows < 200 and 60 < columns < 200 and ticks >= 5, (rows, columns, ticks)
