"""The HTML report: complete, self-contained, well-formed, nothing unescaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from analysis import load
from analysis.__main__ import main
from analysis.report import html

VOID = {"meta", "img", "br"}


class Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.sources += [value for key, value in attrs if key in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def pages(store_cell, tmp_path, capsys):
    store_cell("base", [100.0, 110.0])
    store_cell("tessa", [90.0, 99.0], base=[100.0, 110.0])
    folder = store_cell("slora", [1.0], status="failed", reason="<script>alert(1)</script>")
    (folder / "engine.log").write_text("first line\nlast <line>\n")
    store_cell("base", [5.0, 6.0], experiment="my_own")
    assert main(["report", str(tmp_path / "results"), "--out", str(tmp_path / "out")]) == 0
    listed = capsys.readouterr().out.split()
    assert [p.rsplit("/", 1)[1] for p in listed] == ["index.html", "tp_scaling.html", "my_own.html"]
    return {p.name: p.read_text() for p in (tmp_path / "out").iterdir()}


def test_pages_stand_alone(pages):
    for name, text in pages.items():
        checker = Checker()
        checker.feed(text)
        assert checker.open == [], name
        for source in checker.sources:
            assert source.startswith("data:image/png;base64,") or source in pages
        assert not re.search(r"https?://", text)
        assert '<meta name="viewport"' in text


def test_a_page_holds_figure_numbers_failures_and_provenance(pages):
    page = pages["tp_scaling.html"]
    assert page.count("data:image/png;base64,iVBOR") == 1
    assert "python run.py experiment=tp_scaling model=tiny tp=1" in page
    assert "94.5" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page
    assert "last &lt;line&gt;" in page
    assert "a CPU, 2 cores" in page
    assert "c" * 12 in page
    assert "time to first token" in page


def test_the_index_has_claims_and_what_is_missing(pages):
    index = pages["index.html"]
    assert all(f">C{i}<" in index for i in range(1, 7))
    assert "not tested" in index
    assert "rate_sweep: no results" in index
    assert "my_own.html" in index


def test_an_empty_store_has_an_index(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 0
    assert "No results are stored yet." in (tmp_path / "out" / "index.html").read_text()


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["report", str(tmp_path / "none"), "--out", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_provenance_tells_clean_from_dirty(store_cell, tmp_path):
    store_cell("base", [1.0], git={"sha": "e" * 40, "dirty": True})
    store_cell("base", [1.0], tp=2, git={"sha": None, "dirty": None})
    text = html.provenance(load(tmp_path / "results"))
    assert "uncommitted changes" in text
    assert "unknown" in text
