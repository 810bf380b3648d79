"""The results in README.md and results/README.md come from the reference sets, and a change of either is noticed."""

from __future__ import annotations

from pathlib import Path

import analysis_store
import matplotlib.pyplot as plt
import pandas as pd
import pytest

from analysis import benchmarks, files, load, readme, style
from analysis.__main__ import main
from analysis.report import html
from tessa.errors import UserError


def marked(folder: Path) -> tuple[Path, Path]:
    """Both pages in `folder`, with nothing between their marks."""
    pages = folder / "README.md", folder / "DETAILS.md"
    for page in pages:
        page.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    return pages


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Both pages with the results of a small store between their marks, and the store."""
    root = tmp_path_factory.mktemp("readme")
    base = [100.0, 104.0, 96.0]
    for tp in (1, 2):
        analysis_store.write_cell(root, "base", base, tp)
        analysis_store.write_cell(root, "tessa", [95.0, 98.8, 91.2], tp, base=base)
        if tp == 1:
            analysis_store.write_cell(root, "slora", [80.0, 83.0, 77.0], tp, base=base)
    analysis_store.write_cell(root, "slora", [], 2, status="failed")
    pages = marked(root)
    written = readme.write(*pages, root / "results")
    assert [p.name for p in written] == ["README.md", "DETAILS.md", "tp_scaling.png"]
    return *pages, root / "results"


@pytest.mark.parametrize("page", [0, 1])
def test_a_row_per_backend_with_both_degrees_claims_and_figure(
    shown: tuple[Path, Path, Path], page: int
) -> None:
    text = shown[page].read_text()
    assert text.startswith(f"before\n{readme.BEGIN}\n5 cells on a CPU, 2 cores")
    assert text.endswith(f"{readme.END}\nafter\n")
    named = [(line.split(" | ")[0].strip("| "), line) for line in text.splitlines() if line.startswith("| ")]
    rows = dict(reversed(named))
    assert "| TESSA | 95.0 ± 9.4 | 5.0 ± 0.0 % | 10.0 ms | 2 | 95.0 ± 9.4 | 5.0 ± 0.0 % |" in rows["TESSA"]
    assert rows["TESSA"].endswith("| 1.00 MiB | ccccccc |")
    assert "| failed | – | – | – | – |" in rows["S-LoRA"]
    assert rows["base"].count("–") == 2
    assert sum(name.startswith("C") for name in rows) == 6
    assert '<img src="results/figures/tp_scaling.png"' in text
    assert ("[DETAILS.md](DETAILS.md)" in text) == (page == 0)
    assert readme.differences(*shown) == []


def test_what_adapters_add_to_a_step_is_counted(shown: tuple[Path, Path, Path]) -> None:
    part = shown[0].read_text().partition("Counted on a decode step")[2]
    (row,) = (line for line in part.splitlines() if line.startswith("| TESSA |"))
    assert row.startswith("| TESSA | 0 | ")
    assert " 1.00 MiB |" in row


def test_a_benchmarks_table_is_shown_unless_its_tree_was_dirty(tmp_path: Path) -> None:
    rows = pd.DataFrame(
        {
            "layer": "qkv", "phase": "decode", "tokens": 32, "adapters": [1, 8], "rank": 4, "ours_us": 10.0,
            "vllm_us": [50.0, 90.0], "vllm_over_ours": [5.0, 9.0], "model": "small", "dtype": "float32", "threads": 1,
            "machine": "a CPU", "git_sha": "c" * 40, "git_dirty": False,
        }
    )  # fmt: skip
    (tmp_path / "lora_ops").mkdir()
    rows.to_csv(tmp_path / "lora_ops" / "rows.csv", index=False)
    (text,) = benchmarks.tables(tmp_path)
    assert "| qkv | decode | 2 | 5.0 | 7.0 | 9.0 |" in text
    assert "a CPU, commit ccccccc:" in text
    rows.assign(git_dirty=True).to_csv(tmp_path / "lora_ops" / "rows.csv", index=False)
    assert benchmarks.tables(tmp_path) == []
    (text,) = benchmarks.tables(tmp_path, reference=False)
    assert "commit ccccccc+changes" in text
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert (
        '<td class="text">qkv</td><td class="text">decode</td><td>2</td>'
        in (tmp_path / "out/index.html").read_text()
    )


def test_another_number_in_the_readme_or_figure_is_found(shown: tuple[Path, Path, Path]) -> None:
    *pages, results = shown
    for page in pages:
        text = page.read_text()
        page.write_text(text.replace("95.0", "99.0", 1))
        (found,) = readme.differences(*shown)
        assert "99.0" in found
        page.write_text(text.replace("\n" + readme.END, "one more line\n" + readme.END))
        assert len(readme.differences(*shown)) == 1
        page.write_text(text)
    image = results / "figures" / "tp_scaling.png"
    kept = image.read_bytes()
    try:
        picture = plt.imread(image)
        plt.imsave(image, picture[::-1])
        assert readme.differences(*pages, results) == [f"{image} is not what the reference set gives"]
        plt.imsave(image, picture)
        assert readme.differences(*pages, results) == []
        image.unlink()
        assert readme.differences(*pages, results) == [f"{image} is missing"]
    finally:
        image.write_bytes(kept)


def test_another_result_is_found(shown: tuple[Path, Path, Path], tmp_path: Path) -> None:
    results = shown[2]
    cell = next((results / "tp_scaling").glob("tessa-tp2*/summary.json"))
    kept = cell.read_text()
    try:
        cell.write_text(kept.replace("95.0", "60.0"))
        assert len(readme.differences(*shown)) == 3  # both pages and the figure
    finally:
        cell.write_text(kept)


def test_another_machines_set_is_shown_after_the_first(tmp_path: Path) -> None:
    analysis_store.write_cell(tmp_path, "base", [100.0, 104.0, 96.0])
    (tmp_path / "results").rename(tmp_path / "results_x1")
    analysis_store.write_cell(tmp_path, "base", [50.0, 52.0, 48.0])
    pages, results = marked(tmp_path), tmp_path / "results"
    written = [path.relative_to(tmp_path).as_posix() for path in readme.write(*pages, results)]
    drawn = ["results/figures/tp_scaling.png", "results_x1/figures/tp_scaling.png"]
    assert written == ["README.md", "DETAILS.md", *drawn]
    assert "x1" not in pages[0].read_text()
    first, _, other = pages[1].read_text().partition("**Another machine, x1.** 1 cells on a CPU, 2 cores")
    assert "| base | 50.0" in first
    assert "| base | 100.0" in other
    assert f"`python -m analysis table {tmp_path / 'results_x1'}`" in other
    assert f"`python -m analysis report {tmp_path / 'results_x1'}`" in other
    assert 'src="results_x1/figures/tp_scaling.png"' in other
    assert readme.differences(*pages, results) == []
    (tmp_path / "results_x1" / "figures" / "old.png").write_bytes(b"")
    assert len(readme.differences(*pages, results)) == 1


def test_an_empty_set_says_how_to_fill_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, details = marked(tmp_path)
    (tmp_path / "none").mkdir()
    arguments = [
        "readme",
        "--readme",
        str(file),
        "--details",
        str(details),
        "--results",
        str(tmp_path / "none"),
    ]
    assert main([*arguments, "--check"]) == 1
    assert "python -m analysis readme" in capsys.readouterr().err
    assert main(arguments) == 0
    assert "make reference" in file.read_text()
    assert main([*arguments, "--check"]) == 0
    before = details.read_text()
    file.write_text("no marks")
    with pytest.raises(UserError, match="put the two lines"):
        readme.write(details, file, tmp_path / "none")
    assert details.read_text() == before
    file.unlink()
    assert main(arguments) == 2
    assert "is no file" in capsys.readouterr().err


def test_the_readme_is_what_the_reference_set_gives(repo_root: Path) -> None:
    found = readme.differences(
        repo_root / "README.md", repo_root / "results" / "README.md", repo_root / readme.REFERENCE
    )
    assert not found, "write them anew with `python -m analysis readme`:\n" + "\n".join(found)


def test_quality_stands_beside_lora(tmp_path: Path) -> None:
    analysis_store.quality(tmp_path / "results", 0.1)
    text = readme.block(load(tmp_path / "results"), tmp_path / "results", {}, "figures")
    (row,) = (line for line in text.splitlines() if line.startswith("| TESSA across, random | 4 |"))
    assert row.endswith("| yes |")
    assert "3 seeds" in text
    heads = [line for line in text.splitlines() if "| p (Holm) |" in line]
    assert heads == [
        "| structure | r | params | rate | mean of tasks | - LoRA | p (Holm) | in LoRA's |",
        "| slices compared | r | difference | p (Holm) |",
    ]
    assert sum(line.startswith("| across - along, random |") for line in text.splitlines()) == 4


def test_equal_cells_of_two_experiments_count_twice_and_the_best_ratio_says_where(tmp_path: Path) -> None:
    for experiment in ("tp_scaling", "adapter_count"):
        analysis_store.point(
            tmp_path, experiment, "a", {"slora": 0.4, "tessa": 0.1}, labels={"concurrency": 3}
        )
    results = tmp_path / "results"
    text = readme.block(load(results), results, {}, "figures")
    assert text.startswith("6 cells on ")
    (row,) = (line for line in text.splitlines() if line.startswith("| C6:"))
    assert "tessa at TP 1, greatest of 2; " in row
    assert "concurrency 3" in row
    assert any(f"; {name}, model tiny" in row for name in ("tp_scaling", "adapter_count"))


@pytest.mark.parametrize(("inches", "share"), [(style.ONE_COLUMN, "48%"), (style.TWO_COLUMNS, "100%")])
def test_a_figure_of_two_columns_has_the_whole_width(tmp_path: Path, inches: float, share: str) -> None:
    png, _ = files.write(plt.figure(figsize=(inches, 1)), tmp_path, "a")
    text = readme.block(load(tmp_path), tmp_path, {"a.png": png.read_bytes()}, "f")
    assert f'<img src="f/a.png" alt="a" width="{share}">' in text
    image = html.Image("a", png.read_bytes(), {"caption": "A", "commands": []})
    assert ('<figure class="wide">' in html._figure(image)) == (share == "100%")
