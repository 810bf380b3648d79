"""Collectives of real ranks: what is timed, the namespaces, and a short run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pandas as pd
import pytest

from experiments import bench_collectives as bench
from experiments.projection.links import predict
from tessa.errors import UserError


def test_every_kind_is_swept_and_the_backends_send_their_own() -> None:
    table = pd.DataFrame(bench.messages())
    sweep = table[table.backend == "sweep"]
    assert sweep.groupby("kind").message_bytes.nunique().to_dict() == dict.fromkeys(bench.KINDS, 7)
    assert table[table.backend == "slora"]["count"].sum() == 6
    assert table[table.backend == "base"]["count"].sum() == 2


def test_without_root_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UserError, match="root"), bench.namespaces():
        pass


def test_namespaces_reach_each_other_and_go_away() -> None:
    try:
        with bench.namespaces() as names:
            probe = ["ip", "-o", "-n", names[0], "addr", "show"]
            assert bench.HOSTS[0] in subprocess.run(probe, capture_output=True, text=True).stdout
            listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
            assert all(name in listed for name in names)
    except UserError as error:
        pytest.skip(f"no network namespaces here: {error}")
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not any(name in listed for name in names)


def test_a_transport_that_cannot_run_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(transport: str, ranks: int, rounds: int) -> pd.DataFrame:
        raise UserError("not here")

    monkeypatch.setattr(bench, "measure", refuse)
    assert bench.main(["--tp", "2", "--transports", "gloo", "--out", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "left out: gloo, 2 ranks: not here" in shown
    assert "nothing was measured" in shown
    assert not (tmp_path / "rows.csv").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--rounds", "0"], "--rounds is 0; give 1 or more"),
        (["--tp", "2", "1"], "--tp 1: collectives need 2 ranks"),
    ],
)
def test_too_little_is_refused(
    given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([*given, "--out", str(tmp_path / "o")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.engine
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_two_ranks(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SWEEP_BYTES", (1024, 16384, 262144, 1048576, 4194304))
    code = bench.main(["--tp", "2", "--transports", transport, "--rounds", "1", "--out", str(tmp_path)])
    if code and "no shared-memory collectives" in (said := capsys.readouterr().err):
        pytest.skip(said)
    assert code == 0
    rows = pd.read_csv(tmp_path / "rows.csv")
    assert set(rows.provenance) == {"measured"}
    assert (rows.seconds > 0).all()
    sweep = rows[(rows.backend == "sweep") & (rows.kind == "all_reduce")]
    assert sorted(sweep.message_bytes) == list(bench.SWEEP_BYTES)
    assert len(predict(rows)) == len(rows)
    assert (tmp_path / "links.csv").is_file()
