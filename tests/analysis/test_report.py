"""The HTML report: complete, self-contained, well-formed, nothing unescaped."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser

import analysis_store
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


@pytest.fixture
def study_pages(complete_results, tmp_path):
    """A layer step with rows that failed, and a projection; the former in part of a tree that was not clean."""
    results = tmp_path / "results"
    for name in ("layer_step", "projection"):
        shutil.copytree(complete_results / name, results / name)
    rows = analysis_store.layer_step_rows().assign(reason="")
    rows.loc[rows["variant"] == "tessa:wide", ["status", "reason"]] = ["failed", "KernelError: <no image>"]
    rows.loc[rows["variant"] == "punica", ["git_sha", "git_dirty"]] = list(analysis_store.DIRTY.values())
    rows.to_csv(results / "layer_step" / "rows.csv", index=False)

    def write(*flags):
        assert main(["report", str(results), "--out", str(tmp_path / "out"), *flags]) == 0
        return {page.name: page.read_text() for page in (tmp_path / "out").iterdir()}

    return write


def test_a_study_s_page_holds_numbers_failures_and_provenance(study_pages):
    pages = study_pages()
    step, projection = pages["layer_step.html"], pages["projection.html"]
    assert "<th>base, µs/layer</th><th>Punica</th><th>TESSA</th>" in step
    assert (
        '<td class="text">decode</td><td>8</td><td>4</td><td>1,000.0</td><td>40.0</td><td>40.0</td>' in step
    )
    assert "KernelError: &lt;no image&gt;" in step
    assert "<td>11</td>" in step
    assert all(text in step for text in ("c" * 12, "d" * 12, "uncommitted changes", "emulated", "passed"))
    assert "layer_ops_median_error" in projection
    assert "C6: TESSA / S-LoRA" in projection
    assert "modelled" in projection
    assert ">33 rows</td><td>11 rows</td>" in pages["index.html"]
    for text in pages.values():
        checker = Checker()
        checker.feed(text)
        assert checker.open == []


def test_a_quality_page_compares_tessa_s_slices_and_leaves_the_others_their_definitions(tmp_path, capsys):
    analysis_store.quality(tmp_path / "results")
    analysis_store.write_cell(tmp_path, "base", [1.0, 2.0], labels={"measure": "smoke"})
    assert main(["report", str(tmp_path / "results"), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "quality.html").read_text()
    assert page.count('<td class="text">across - along, random</td>') == 4
    assert "TESSA&#x27;s slices at equal budget" in page
    served = (tmp_path / "out" / "tp_scaling.html").read_text()
    assert "<summary>Definitions</summary>" in served
    assert "its times say nothing about speed" in served
    assert "<summary>Definitions</summary>" not in page


def test_a_reference_page_has_no_rows_of_a_dirty_tree(study_pages):
    pages = study_pages("--reference")
    assert "Punica" not in pages["layer_step.html"].partition("Numbers")[2]
    assert "d" * 12 not in pages["layer_step.html"]
    assert "11 rows left out of reference figures" in pages["index.html"]


def test_the_index_has_claims_and_what_is_missing(pages):
    index = pages["index.html"]
    assert all(f">C{i}<" in index for i in range(1, 7))
    assert "not tested" in index
    assert "rate_sweep: no results" in index
    assert "my_own.html" in index


def test_an_empty_store_has_an_index(tmp_path, capsys):
    (tmp_path / "none").mkdir()
    assert main(["report", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 0
    assert "No results are stored yet." in (tmp_path / "out" / "index.html").read_text()


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "none").mkdir()
    assert main(["report", str(tmp_path / "none"), "--out", str(tmp_path / "file")]) == 2
    assert "a file is in the way. Choose another folder with --out" in capsys.readouterr().err


def test_provenance_tells_clean_from_dirty(store_cell, tmp_path):
    store_cell("base", [1.0], git={"sha": "e" * 40, "dirty": True})
    store_cell("base", [1.0], tp=2, git={"sha": None, "dirty": None})
    text = html.provenance(load(tmp_path / "results"))
    assert "uncommitted changes" in text
    assert "unknown" in text
