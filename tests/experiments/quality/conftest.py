"""A base model that takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.quality import base

TINY = {"hidden_size": 64, "intermediate_size": 96, "layers": 2, "heads": 4, "steps": 12, "batch": 16}


@pytest.fixture(scope="session")
def tiny_base(cache: Path) -> Path:
    """The checkpoint of TINY, kept between runs."""
    import torch

    torch.set_num_threads(1)
    return base.ensure_base(base.settings(TINY), cache)
