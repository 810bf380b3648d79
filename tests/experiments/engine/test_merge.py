"""The cache of merged models: which folder stands for which weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.engine import merge


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Path]]:
    """(model, adapter) of every merging, which takes place in name only."""
    done: list[tuple[Path, Path]] = []

    def run_module(failure: str, module: str, model: Path, adapter: Path, out: Path) -> None:
        out.mkdir()
        done.append((model, adapter))

    monkeypatch.setattr(merge, "run_module", run_module)
    return done


def weights(folder: Path, content: str = "x") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text(content)
    return folder


def test_a_merged_model_is_kept_for_its_weights_alone(
    merged: list[tuple[Path, Path]], tmp_path: Path
) -> None:
    adapter = weights(tmp_path / "set" / "adapter-0000")
    model, namesake = weights(tmp_path / "a" / "model"), weights(tmp_path / "b" / "model")
    one = merge.ensure_merged(model, adapter, tmp_path)
    assert merge.ensure_merged(model, adapter, tmp_path) == one
    assert merged == [(model, adapter)]
    assert merge.ensure_merged(namesake, adapter, tmp_path) != one
    weights(model, "trained further")
    assert merge.ensure_merged(model, adapter, tmp_path) != one
    assert len(merged) == 3
