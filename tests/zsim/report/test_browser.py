"""The page in a real Chromium: no message on its console, no request, every widget operated.

It needs `pip install playwright`, and Debian's package chromium or `playwright install chromium`;
without them it is skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.report import data_of, of_record, of_scenario, report
from zsim.report.sides import ReportSide

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)
pytestmark = [pytest.mark.browser, pytest.mark.no_cover]


@pytest.fixture(scope="module")
def sides() -> list[ReportSide]:
    """A simulated step of HSDP on two nodes, and a record that counts as measured."""
    scenario = zsim.Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 1, "sequence_length": 32},
        cluster={"preset": "dgx-h100", "nodes": 2}, precision={"parameters": "bf16"},
        strategy={"name": "hsdp", "dp_replicate": 2, "dp_shard": 8}, name="</script>",
    )
    simulated = of_scenario(scenario)
    measured = replace(simulated.record, interpreter="observer", backend="nccl")
    return [simulated, of_record(measured)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        chromium = CHROMIUM or playwright.chromium.executable_path
        if not Path(chromium).exists():
            pytest.skip("no Chromium: apt-get install chromium, or playwright install chromium")
        opened = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def file(sides, tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report(sides), encoding="utf-8")
    return path


@pytest.fixture
def page(browser, file) -> Iterator[Any]:
    """The open page; at the end nothing may have been said on its console or asked of a network."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    opened, said, asked = context.new_page(), [], []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(file.as_uri())
    opened.wait_for_selector("html[data-ready]", state="attached")
    yield opened
    context.close()
    assert said == []
    assert asked == [file.as_uri()]


def told(page: Any, section: str) -> str:
    return str(page.inner_text(f"#{section} .output"))


def picture(page: Any, section: str) -> str:
    return str(page.evaluate(f"document.querySelector('#{section} canvas').toDataURL()"))


def test_the_timeline_zooms_pans_and_tells_of_each_span_by_mouse_and_keys(page):
    whole = picture(page, "timeline")
    for label in ("Zoom in", "Later", "Zoom out", "Earlier", "Show the whole step"):
        before = picture(page, "timeline")
        page.click(f'#timeline button[aria-label="{label}"]')
        assert picture(page, "timeline") != before
    assert picture(page, "timeline") == whole
    page.focus("#timeline canvas")
    for key in ("+", "ArrowRight", "ArrowLeft", "0", "n"):
        before = picture(page, "timeline")
        page.keyboard.press(key)
        assert picture(page, "timeline") != before
    first = told(page, "timeline")
    assert "rank 0 and 13 ranks like it, compute" in first
    page.keyboard.press("n")
    assert told(page, "timeline") != first
    page.keyboard.press("p")
    assert told(page, "timeline") == first
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("n")
    assert "over dp_shard" in told(page, "timeline")
    box = page.locator("#timeline canvas").bounding_box()
    tips = set()
    for part in range(15, 75, 2):
        page.mouse.move(box["x"] + box["width"] * part / 100, box["y"] + 55)
        tips.add(page.inner_text("#tip"))
    assert any("rank 0" in tip for tip in tips)
    page.keyboard.press("+")
    before = picture(page, "timeline")
    page.mouse.down()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 55)
    page.mouse.up()
    assert picture(page, "timeline") != before


def test_memory_is_scrubbed_and_says_who_holds_what(page, sides):
    memory = data_of(sides)["sides"][0]["memory"]
    assert "the peak" in told(page, "memory")
    owners = page.inner_text("#memory table")
    assert "activations" in owners
    page.focus("#memory input")
    page.keyboard.press("Home")
    assert told(page, "memory").startswith("before the first op")
    assert "activations" not in page.inner_text("#memory table")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert told(page, "memory").startswith(memory["labels"][memory["points"][2][0]])
    page.click('#memory button[aria-label="Go to the peak"]')
    assert page.inner_text("#memory table") == owners


def test_each_stage_shows_its_holders_at_each_change(page, sides):
    stages = data_of(sides)["sides"][0]["holders"]
    seen = set()
    for number, stage in enumerate(stages):
        page.select_option("#stage", str(number))
        assert told(page, "holders").startswith(f"{stage['name']}, {stage['formula']}: between")
        page.click('#holders button[aria-label="Next change"]')
        assert "(1 of" in told(page, "holders")
        seen.add(picture(page, "holders"))
    assert len(seen) >= len(stages) - 1  # hsdp's own and another may hold alike
    page.click('#holders button[aria-label="Change before"]')
    assert "between two steps" in told(page, "holders")
    page.select_option("#stage", label="zero2")
    assert "between two steps, gradients freed (0 of" in told(page, "holders")
    page.select_option("#stage", label="zero3")
    for unit in ("root", "blocks.0", "blocks.1"):
        page.click("#holders button:has-text('Next gather')")
        assert f"after all_gather {unit} " in told(page, "holders")
    box = page.locator("#holders canvas").bounding_box()
    page.mouse.move(box["x"] + 120, box["y"] + 40)
    assert "rank 0, " in page.inner_text("#tip")
    page.mouse.wheel(0, 400)  # the page goes on below the pointer
    page.locator("#tip").wait_for(state="hidden")
    page.focus("#holders canvas")
    page.keyboard.press("ArrowRight")
    first = told(page, "holders")
    page.keyboard.press("ArrowDown")
    assert first.startswith("rank 0, ")
    assert told(page, "holders").startswith("rank 1, ")


def test_links_and_devices_of_the_topology_tell_their_traffic_and_groups(page):
    links = page.locator("#topology line[role=button]")
    for number in (0, links.count() - 1):
        links.nth(number).focus()
        page.keyboard.press("Enter")
        assert "a step: " in told(page, "topology")
    page.locator("#topology g[role=button]").nth(3).click()
    assert "rank 3, node0.gpu3\ndp_replicate 0: with 2 of 2 drawn here" in told(page, "topology")
    colours = page.inner_html("#topology svg")
    page.select_option("#axis", "0")
    assert page.inner_html("#topology svg") != colours


def test_every_candidate_can_be_chosen_and_says_why(page, sides):
    candidates = data_of(sides)["sides"][0]["candidates"]["candidates"]
    rows = page.locator("#candidates tbody").first.locator("tr")
    assert rows.count() == len(candidates)
    for number in range(0, len(candidates), 5):
        page.locator("#candidates tbody").first.locator("tr").nth(number).click()
        chosen = candidates[number]
        assert told(page, "candidates").startswith(f"{chosen['name']}: {chosen['why']}")
    page.locator("#candidates svg g[role=button]").first.focus()
    page.keyboard.press(" ")
    assert told(page, "candidates").startswith(candidates[0]["name"])
    page.select_option("#across", "sent")
    assert "sent per rank" in page.inner_text("#candidates .draw")


def test_the_other_side_has_what_a_record_has(page):
    page.select_option("#side", "1")
    assert "report on its scenario" in told(page, "holders")
    assert "report on its scenario" in page.inner_text("#waterfall")
    assert "allocated" in page.inner_text("#memory .legend")
    page.select_option("#side", "0")
    assert "needed" in page.inner_text("#waterfall")


def test_figures_stand_side_by_side_with_the_checks_below(page, sides):
    heads = page.locator("#facts table").first.locator("th")
    assert heads.all_inner_texts() == ["", *(side.name for side in sides)]
    (step,) = page.locator("#facts tr", has_text="step time").filter(has_text=" to ").all()
    assert len(step.locator("td").all()) == 3
    assert "collective order" in page.inner_text("#facts")


def test_colours_change_and_nothing_is_wider_than_a_narrow_screen(page):
    shades = set()
    for _ in range(3):
        shades.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.click("#theme")
    assert len(shades) == 2
    page.set_viewport_size({"width": 420, "height": 800})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420


def test_paper_has_every_section_and_no_controls(page):
    page.emulate_media(media="print")
    assert not page.is_visible("#timeline .controls")
    assert page.is_visible("#assumed table")
    assert page.pdf().startswith(b"%PDF")


def test_the_keyboard_reaches_every_widget(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "side"
    for section in page.locator("main section").all():
        name = section.get_attribute("id")
        page.click(f"#{name} h2")  # the next key goes on from there
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('section').id") == name


def test_a_side_much_shorter_than_another_has_an_axis_of_its_own(browser, tmp_path):
    """Spans of the short step are found by the pointer in the right half of the drawing."""
    short = zsim.Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 1, "sequence_length": 32},
        cluster={"preset": "dgx-h100"}, strategy={"name": "fsdp2"}, name="short",
    )
    long = zsim.Scenario(
        model={"preset": "llama-3-8b"}, batch={"micro_batch": 1, "sequence_length": 4096},
        cluster={"preset": "dgx-h100"}, strategy={"name": "fsdp2"}, name="long",
    )
    file = tmp_path / "two.html"
    file.write_text(report([of_scenario(short), of_scenario(long)]), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    page.locator("#timeline canvas").scroll_into_view_if_needed()
    box = page.locator("#timeline canvas").bounding_box()
    tips = set()
    for part in range(50, 70):
        page.mouse.move(box["x"] + box["width"] * part / 100, box["y"] + 55)
        tips.add(page.inner_text("#tip"))
    assert any("compute" in tip for tip in tips)
    assert data_of([of_scenario(long)])["timeline"]["end_ns"] > 10**8
    assert not any(" s," in tip for tip in tips)  # its own times, below those of the long step
    page.screenshot(path=str(tmp_path / "two.png"))
    page.close()
    assert said == []
