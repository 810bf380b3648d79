from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
from tests_support import model_values

from experiments.estimate import engine_gib, side_by_side


def group(device: str = "cpu", tp: int = 2) -> SimpleNamespace:
    engine = {"tp": tp, "dtype": "float32", "device": device, "engine": {"kv_cache_gib": 0.25}}
    return SimpleNamespace(engine=engine, config=SimpleNamespace(model=model_values("small")))


def test_an_engine_needs_its_processes_cache_and_weights() -> None:
    # 4 processes, 2 caches, and 51 million weights of 4 bytes kept twice.
    assert engine_gib(group()) == pytest.approx(4 * 0.65 + 2 * 0.25 + 2 * 0.165, rel=0.1)
    assert engine_gib(group(tp=4)) > engine_gib(group())


def test_engines_stay_side_by_side_where_memory_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * 2**30))
    assert side_by_side([group(), group()]) is None
    assert "3 engines need about 11 GiB and 8 GiB are free" in (side_by_side([group()] * 3) or "")
    assert side_by_side([group("cuda")]) == "an engine takes the whole GPU"
