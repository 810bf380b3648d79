"""From stored cells to tables and figures. `load` is the way in."""

from __future__ import annotations

from analysis.load import load

__all__ = ["load"]
