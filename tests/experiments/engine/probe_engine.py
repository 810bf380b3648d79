"""Starts one engine as a run would, and writes its gate, its counters and its nodes: `OUT.json OVERRIDE...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

from experiments import cli, config
from experiments.engine.parent import make_engine

CONF = Path(__file__).resolve().parents[3] / "conf"


def main(out: str, *overrides: str) -> None:
    config.register()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        run = config.build(compose("config", overrides=list(overrides)))
    group = cli.plan_run(run, device="cpu").points[0].groups[0]
    engine = make_engine(group, Path(out).with_suffix(".log"), cli.cache_folder(run))
    try:
        engine.start(1800)
        said = {
            "gate": engine.gate({}),
            "counters": engine.counters(),
            "nodes": getattr(engine, "nodes", []),
        }
    finally:
        engine.stop()
    Path(out).write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
