"""The page in a real browser: no error, no request, and switches that switch."""

import base64
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bayesrnn.train import loop
from small_runs import small_recipe

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no chromium with chromedriver here (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    options.add_argument("--hide-scrollbars")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        found.set_script_timeout(SECONDS)
        yield found
    finally:
        found.quit()


def written(page: Path, *runs: Path, pictures: Path | None = None, text: Path | None = None) -> str:
    """The address of a page about these runs."""
    import bayesrnn.report as report

    choices = report.Choices((0, 3), pictures=pictures, text=text)
    found = [report.examine(r, r.name, choices, lambda w, n: lambda d: None) for r in runs]
    report.write_page(found, choices, page)
    return page.as_uri()


@pytest.fixture(scope="module")
def address(bayes: Path, plain: Path, folder: Path) -> str:
    return written(folder / "page.html", plain, bayes)


@pytest.fixture(scope="module")
def captions(dropout: Path, brnn: Path, folder: Path) -> str:
    """A page of captions, every second one with its picture."""
    (folder / "pictures").mkdir()
    try:
        from PIL import Image
    except ImportError:
        return written(folder / "captions.html", dropout, brnn)
    for number in range(0, 9, 2):
        Image.new("RGB", (60, 40), "teal").save(folder / "pictures" / f"test{number}.jpg")
    return written(folder / "captions.html", dropout, brnn, pictures=folder / "pictures")


@pytest.fixture(scope="module")
def series(still: Path, waves: Path, folder: Path) -> str:
    return written(folder / "series.html", still, waves)


def opened(browser: Any, address: str, width: int = 1280, theme: str = "light") -> None:
    """Open the page anew and wait until it is drawn."""
    browser.get("about:blank")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(address)
    wait_for(browser, "document.documentElement.dataset.ready")


def wait_for(browser: Any, condition: str) -> None:
    end = time.monotonic() + SECONDS
    while not browser.execute_script(f"return {condition}"):
        assert time.monotonic() < end, (condition, browser.get_log("browser"))
        time.sleep(0.05)


def click(browser: Any, name: str, value: str) -> None:
    browser.execute_script(
        "document.querySelector(`input[name='${arguments[0]}'][value='${arguments[1]}']`).click()",
        name,
        value,
    )


def shades(browser: Any) -> list[float]:
    """Of the words on show."""
    words = "document.querySelectorAll('.page:not([hidden]) .w')"
    found = browser.execute_script(f"return [...{words}].map(w => w.style.getPropertyValue('--u'))")
    return [float(value) for value in found]


def expected_shades(words: list[Any], scale: list[float], measure: str) -> Any:
    low, high = scale
    found = [0 if w is None else min(max((w[measure] - low) / (high - low), 0), 1) for w in words]
    return pytest.approx(found, abs=6e-4)


def assert_quiet(browser: Any) -> None:
    assert browser.get_log("browser") == []
    messages = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    sent = [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in sent if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
    assert len([url for url in sent if url.startswith("file:")]) == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", ["address", "captions", "series"])
def test_it_is_drawn_without_an_error_a_request_or_an_overflow(
    browser: Any,
    page: str,
    tmp_path: Path,
    width: int,
    theme: str,
    request: pytest.FixtureRequest,
) -> None:
    opened(browser, request.getfixturevalue(page), width, theme)
    drawn = "[...document.querySelectorAll('.plot')].filter(p => p.offsetParent)"
    assert browser.execute_script(f"return {drawn}.every(p => p.querySelector('svg.main-svg'))")
    assert browser.execute_script(f"return {drawn}.length") >= 10
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    (tmp_path / "page.png").write_bytes(base64.b64decode(picture["data"]))
    assert (tmp_path / "page.png").stat().st_size > 20_000
    assert_quiet(browser)


def test_the_switch_shades_the_text_by_another_measure(browser: Any, address: str) -> None:
    opened(browser, address)
    data = browser.execute_script("return JSON.parse(document.getElementById('data').textContent)")
    words = data["passages"][1]
    seen = {}
    for measure in ("total", "aleatoric", "epistemic"):
        click(browser, "measure-text", measure)
        seen[measure] = shades(browser)
        assert seen[measure] == expected_shades(words, data["scales"]["text"][measure], measure)
    assert seen["total"] != seen["epistemic"]
    click(browser, "passage", "0")  # the plain run: nothing is epistemic
    assert set(shades(browser)) == {0.0}
    assert_quiet(browser)


def test_a_word_tells_its_predictions_by_pointer_and_by_keyboard(
    browser: Any, address: str
) -> None:
    opened(browser, address)
    data = browser.execute_script("return JSON.parse(document.getElementById('data').textContent)")
    words = data["passages"][1]

    def told() -> tuple[list[str], float]:
        top = "[...document.querySelectorAll('.top-words span')].map(e => e.textContent)"
        total = "Number(document.querySelector('.parts .total dd').textContent)"
        return tuple(browser.execute_script(f"return [{top}, {total}]"))

    def expected(at: int) -> tuple[list[str], float]:
        spoken = {"<eos>": "¶ end of line", "<unk>": "unknown word"}
        names = [spoken.get(word, word) for word, _ in words[at]["top"]]
        return names, pytest.approx(words[at]["total"], abs=6e-4)

    page = browser.find_element("css selector", ".page:not([hidden])")
    page.find_element("css selector", '[data-i="5"]').click()
    assert told() == expected(5)
    page.find_element("css selector", '[data-i="5"]').send_keys("\ue014")  # arrow to the right
    assert told() == expected(6)
    page.find_element("css selector", '[data-i="6"]').send_keys("\ue010")  # the end
    assert told() == expected(len(words) - 1)
    reachable = "document.querySelectorAll('.page:not([hidden]) .w[tabindex=\"0\"]').length"
    assert browser.execute_script(f"return {reachable}") == 1  # one stop for the tab key


def test_what_was_expected_and_came_is_marked(browser: Any, folder: Path) -> None:
    """Blanks, and letters that the model does not know, too."""
    recipe = small_recipe(folder / "l", data={"tokens": "characters", "max_vocabulary": 5})
    loop.train(recipe, folder / "letters", quiet=True)
    (folder / "letter.txt").write_text("w1 w% w")
    opened(browser, written(folder / "l.html", folder / "letters", text=folder / "letter.txt"))
    data = browser.execute_script("return JSON.parse(document.getElementById('data').textContent)")
    for at, came, word in ((2, "␣ blank", " "), (4, "%", "<unk>")):
        top = [each for each, _ in data["passages"][0][at]["top"]]
        assert word in top
        browser.find_element("css selector", f'.words [data-i="{at}"]').click()
        assert browser.find_element("css selector", ".chosen").text == came
        hits = browser.execute_script(
            "return [...document.querySelectorAll('.top-words li')].map(e => e.className)"
        )
        assert hits == ["hit" if each == word else "" for each in top]


def test_captions_are_shaded_and_tell_their_predictions_as_a_text_does(
    browser: Any, captions: str
) -> None:
    opened(browser, captions)
    data = browser.execute_script("return JSON.parse(document.getElementById('data').textContent)")
    places = "[...document.querySelectorAll('.pictures [data-words]')].map(p => p.dataset.words)"
    shown = [data["passages"][int(at)] for at in browser.execute_script(f"return {places}")]
    assert len(shown) == 18  # nine pictures, two runs
    words = [word for caption in shown for word in caption]
    seen = []
    for measure in ("total", "aleatoric", "epistemic"):
        click(browser, "measure-captions", measure)
        scale = data["scales"]["captions"][measure]
        seen.append(shades(browser))
        assert seen[-1] == expected_shades(words, scale, measure)
    assert seen[0] != seen[2]
    spoken = {"<eos>": "▪ the end", "<unk>": "unknown word"}
    told = "[...document.querySelectorAll('.top-words span')].map(e => e.textContent)"
    for at in (0, len(shown[0])):  # the first word of a run's caption, and of the next run's
        browser.execute_script("document.querySelectorAll('.w')[arguments[0]].click()", at)
        assert browser.execute_script(f"return {told}") == [
            spoken.get(word, word) for word, _ in words[at]["top"]
        ]
    loaded = "[...document.images].every(i => i.complete && i.naturalWidth > 0)"
    assert browser.execute_script(f"return {loaded}")
    assert_quiet(browser)


def test_a_fan_shows_the_bands_of_one_run_and_one_view(browser: Any, series: str) -> None:
    opened(browser, series)
    bands = """
      return [...document.querySelectorAll(".plot.fan")].map(plot => plot.data
        .filter(trace => trace.meta && trace.visible).map(trace => trace.meta.join(" ")))
    """

    def shown() -> tuple[list[list[str]], str]:
        key = browser.find_element("css selector", ".key")
        return browser.execute_script(bands), key.text.replace("\n", " ")

    assert shown()[0] == [["total 1", "total 1"]] * 2  # two columns; the last run comes first
    assert "50 %" in shown()[1]
    click(browser, "spread-0", "epistemic")
    wait_for(browser, "document.querySelector('.plot.fan').data[2].visible === false")
    assert shown()[0] == [["epistemic 1", "epistemic 1"]] * 2
    assert "own doubt" in shown()[1]
    assert "50 %" not in shown()[1]
    click(browser, "fan-0", "0")
    wait_for(browser, "document.querySelector('.plot.fan').data[2].visible === true")
    assert shown()[0] == [["epistemic 0", "epistemic 0"]] * 2
    assert_quiet(browser)


def test_the_chosen_word_never_covers_what_is_told_of_it(
    browser: Any, address: str, captions: str
) -> None:
    # The last word is scrolled to where the readout of a phone sticks, at the bottom.
    behind = """
      document.documentElement.style.scrollBehavior = "auto";
      const word = [...document.querySelectorAll(".page:not([hidden]) .w[role=button]")].at(-1);
      word.click();
      scrollBy(0, word.getBoundingClientRect().top - innerHeight + 60);
      const { left, right, top, bottom } = word.getBoundingClientRect();
      const readout = document.querySelector(".readout");
      const box = readout.getBoundingClientRect();
      const seen = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
      return [box.top < top && bottom < box.bottom, readout.contains(seen)];
    """
    for page in (address, captions):
        opened(browser, page, width=390)
        assert browser.execute_script(behind) == [True, True]


def test_the_theme_switch_restyles_page_and_charts(browser: Any, address: str) -> None:
    opened(browser, address, theme="light")
    ink = "getComputedStyle(document.body).color"
    line = "document.querySelector('[data-figure=entropy_gap]').data[1].line.color"
    before = browser.execute_script(f"return [{ink}, {line}]")
    click(browser, "theme", "dark")
    after = browser.execute_script(f"return [{ink}, {line}]")
    assert before[0] != after[0]
    assert before[1] != after[1]
    click(browser, "theme", "light")
    assert browser.execute_script(f"return [{ink}, {line}]") == before
    assert_quiet(browser)


def test_the_slider_prunes_the_maps(browser: Any, address: str) -> None:
    opened(browser, address)
    shares = []
    for percent in (0, 50, 100):
        browser.execute_script(
            "const s = document.querySelector('input[name=fraction]'); s.value = arguments[0];"
            "s.dispatchEvent(new Event('input'))",
            percent,
        )
        shown = ".maps:not([hidden]) .pruned-only output"
        shares.append(
            browser.execute_script(f"return document.querySelector({shown!r}).textContent")
        )
    assert (shares[0], shares[2]) == ("100\u00a0%", "0\u00a0%")
    assert browser.execute_script("return document.getElementById('weights').dataset.view") == (
        "pruned_at"
    )
    assert_quiet(browser)
