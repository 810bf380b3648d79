"""Entry point: `python run.py experiment=tp_scaling tp=2`, `python run.py status experiment=tp_scaling`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments import cli, config, launch, provenance

MODES = ("run", "status")
_mode = "run"
_exit_codes: list[int] = []


@hydra.main(
    config_path=str(Path(__file__).resolve().parent / "conf"), config_name="config", version_base="1.3"
)
def job(composed: DictConfig) -> int:
    typed = list(HydraConfig.get().overrides.task)
    provenance.mark_command(typed)
    code = cli.execute(composed, mode=_mode, report=report, overrides=typed)
    _exit_codes.append(code)
    if code == cli.EXIT_INTERRUPTED:
        raise KeyboardInterrupt  # ends a sweep too
    return code


def report(results: Path, experiment: str, cells: list[str] | None) -> None:
    """Prints the table of the run's settings and where the figures are."""
    from analysis.__main__ import report as show

    show(results, experiment, cells)


def main() -> int:
    global _mode
    if len(sys.argv) > 1 and sys.argv[1] in MODES:
        _mode = sys.argv.pop(1)
    launch.looking = _mode != "run"
    config.register()
    provenance.mark_submit()
    # Hydra's own short errors hide the cause and exit with 1; with this it hands the exception over.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    failed = cli.guarded(job)
    return failed if failed is not None else max([*_exit_codes, *launch.exit_codes], default=cli.EXIT_OK)


if __name__ == "__main__":
    sys.exit(main())
