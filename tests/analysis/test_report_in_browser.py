"""Every figure, drawn once, and the report around them as a browser shows it on a desktop and on a phone: nothing
overflows, nothing is fetched, images load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest

from analysis import figures, load
from analysis.__main__ import main

WIDTHS = {"desktop": 1280, "phone": 390}


@pytest.fixture(scope="module")
def drawn(complete_results: Path, tmp_path_factory: pytest.TempPathFactory) -> figures.Drawn:
    return figures.draw_all(load(complete_results), complete_results, tmp_path_factory.mktemp("figures"))


@pytest.fixture(scope="module")
def pages(complete_results: Path, drawn: figures.Drawn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(figures, "draw_all", lambda *_: drawn)
        assert main(["report", str(complete_results), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    program = browser.executable()
    if program is None:
        pytest.skip("no Chromium on this machine; on Debian: apt-get install chromium")
    shown = browser.Browser(program, tmp_path_factory.mktemp("profile"))
    yield shown
    shown.close()


def test_every_experiment_has_its_figure(complete_results: Path, drawn: figures.Drawn) -> None:
    """PNG, PDF and a caption that says experiment, provenance and command; nothing but the gaps is missing."""
    said: dict[str, list[str]] = {}
    for path in drawn.paths:
        assert path.stat().st_size > 3000
        assert path.with_suffix(".pdf").is_file()
        caption = json.loads(path.with_suffix(".json").read_text())
        assert caption["provenance"]
        assert caption["caption"].startswith(caption["experiment"])
        assert all(caption["experiment"] in command for command in caption["commands"])
        said.setdefault(caption["experiment"], []).append(path.stem)
    timed = ("collectives", "schedules")  # tables of benchmarks, which no experiment of conf/ writes
    assert set(said) == set(figures.EXPERIMENTS) - set(timed)
    frame = load(complete_results)
    lost = frame[frame["status"] != "complete"]["folder"].nunique()
    missing = [text for text in drawn.missing if not text.startswith(timed)]
    assert len(missing) == lost
    assert all("round 2/3: it broke" in text for text in missing)


@pytest.mark.parametrize("width", WIDTHS.values(), ids=list(WIDTHS))
def test_every_page_fits_and_is_complete(opened: browser.Browser, pages: Path, width: int) -> None:
    files = sorted(pages.glob("*.html"))
    assert len(files) == 13
    for file in files:
        opened.open(file, width)
        wide = opened.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert wide == [width, width], f"{file.name} overflows"
        broken = opened.evaluate(
            "[...document.images].filter(i => !(i.complete && i.naturalWidth > 0)).length"
        )
        assert broken == 0, file.name
        assert opened.evaluate("document.images.length") > 0 or file.name == "index.html"
        boxes = opened.evaluate(
            "[...document.querySelectorAll('.scroll, img, h1, h2, nav')]"
            ".map(e => e.getBoundingClientRect()).filter(r => r.left < 0 || r.right > window.innerWidth).length"
        )
        assert boxes == 0, f"{file.name}: something stands outside of the page"
        outside = [url for url in opened.requests if not url.startswith(("file:", "data:"))]
        assert outside == [], file.name
        fetched = [url for url in opened.requests if url.startswith("file:")]
        assert fetched == [file.resolve().as_uri()], file.name


def test_links_lead_to_pages_that_are_there(opened: browser.Browser, pages: Path) -> None:
    opened.open(pages / "index.html", WIDTHS["desktop"])
    links = opened.evaluate("[...document.links].map(a => a.href)")
    assert links
    assert all(Path(link.removeprefix("file://")).is_file() for link in links)
    assert opened.evaluate("document.querySelectorAll('h1').length") == 1


def test_the_check_itself_sees_an_overflow_and_a_request(opened: browser.Browser, tmp_path: Path) -> None:
    """A page that is wrong in both ways, so that the two tests above can fail."""
    page = tmp_path / "bad.html"
    page.write_text('<div style="width: 2000px">x</div><img src="http://example.invalid/a.png">')
    opened.open(page, WIDTHS["phone"])
    assert opened.evaluate("document.documentElement.scrollWidth") > WIDTHS["phone"]
    assert "http://example.invalid/a.png" in opened.requests
