"""Alpha-beta constants from timed collectives."""

from __future__ import annotations

import pandas as pd
import pytest

from experiments.projection import links

ALPHA, BANDWIDTH = 40e-6, 2e9


def rows(transport: str = "gloo", ranks: int = 2) -> pd.DataFrame:
    """Times that follow the model exactly, over sizes and for the messages of one layer."""
    found = []
    for kind in ("all_reduce", "all_gather"):
        sizes = [(("sweep", kind, 1024 * 4**i, 1)) for i in range(7)]
        own = [
            (backend, k, size, count)
            for backend, calls in links.calls_per_layer(1024, 32, 8).items()
            for k, size, count in calls
            if k == kind
        ]
        for backend, k, size, count in sizes + own:
            seconds = ALPHA + links.moved_bytes(k, ranks, size) / BANDWIDTH
            found.append(
                {
                    "backend": backend, "kind": k, "message_bytes": size, "count": count, "transport": transport,
                    "ranks": ranks, "seconds": seconds,
                }
            )  # fmt: skip
    return pd.DataFrame(found)


def test_bytes_over_a_link_are_those_of_a_ring() -> None:
    assert links.moved_bytes("all_reduce", 4, 100) == 150
    assert links.moved_bytes("all_gather", 4, 100) == 75
    assert links.moved_bytes("all_reduce", 1, 100) == 0


def test_exact_times_give_back_alpha_and_bandwidth() -> None:
    found = links.predict(rows(ranks=4))
    assert found.alpha_s.to_numpy() == pytest.approx(ALPHA, rel=1e-3)
    assert found.bandwidth.to_numpy() == pytest.approx(BANDWIDTH, rel=1e-3)
    assert found.ratio.to_numpy() == pytest.approx(1, rel=1e-3)


def test_backends_messages_and_every_other_size_are_held_out() -> None:
    table = rows()
    found = links.predict(table)
    sweep = found[found.backend == "sweep"]
    assert sorted(sweep[~sweep.held_out].message_bytes.unique()) == [1024 * 4**i for i in (0, 2, 4, 6)]
    assert found[found.backend != "sweep"].held_out.all()
    held = found.set_index(["backend", "kind", "message_bytes"]).held_out
    spoilt = table.copy()
    mask = [bool(held[(r.backend, r.kind, r.message_bytes)]) for r in table.itertuples()]
    spoilt.loc[mask, "seconds"] *= 5
    again = links.predict(spoilt)
    assert again.alpha_s.to_numpy() == pytest.approx(ALPHA, rel=1e-3)
    assert again[again.held_out].ratio.to_numpy() == pytest.approx(0.2, rel=1e-3)


def test_a_layer_of_slora_sends_four_messages_more() -> None:
    calls = links.calls_per_layer(1024, 32, 8)
    assert sum(count for _, _, count in calls["base"]) == 2
    assert sum(count for _, _, count in calls["slora"]) == 6
    assert calls["tessa"] == calls["base"]
    layers = links.per_layer(links.predict(rows())).set_index("backend")
    base = 2 * (ALPHA + links.moved_bytes("all_reduce", 2, 32 * 1024 * 4) / BANDWIDTH)
    assert layers.seconds["base"] == pytest.approx(base)
    assert layers.seconds["slora"] > base + 4 * ALPHA
    assert layers.ratio.to_numpy() == pytest.approx(1, rel=1e-3)


def test_too_few_sizes_give_no_fit() -> None:
    table = rows()
    few = table[(table.backend == "sweep") & (table.message_bytes <= 4096)]
    assert links.predict(few).empty
