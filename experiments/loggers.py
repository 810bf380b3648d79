"""Where finished cells are reported besides the results folder. A logger's trouble never costs a cell."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from experiments.config import LoggerConfig
from experiments.grid import Cell
from experiments.store import jsonable


class Logger(Protocol):
    def log_cell(self, cell: Cell, summary: dict[str, Any]) -> None:
        """Reports one stored cell. Must not raise."""
        ...

    def close(self) -> None:
        """Ends reporting. Must not raise."""
        ...


class NullLogger:
    """Reports nothing."""

    def log_cell(self, cell: Cell, summary: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class WandbLogger:
    """One wandb run per cell, grouped by experiment; each is finished before the next begins.

    mode `auto` is online with an API key and offline without. What is sent is scrubbed as the store does it, and
    what wandb would collect by itself (command line, folders, user, git remote) is left out. After an error the
    logger says so once and stays quiet for the rest of the run.
    """

    def __init__(self, config: LoggerConfig, folder: str, warn: Callable[[str], None]) -> None:
        self._config, self._folder, self._warn = config, folder, warn
        self._broken = self._started = False
        self.mode: Any = config.mode
        if config.mode == "auto":
            self.mode = "online" if has_key() else "offline"

    def log_cell(self, cell: Cell, summary: dict[str, Any]) -> None:
        if self._broken:
            return
        try:
            self._log(cell, summary)
        except Exception as error:
            self._broken = True
            self._warn(
                f"wandb failed ({type(error).__name__}: {error}); the cell is stored, wandb is off from here"
            )

    def _log(self, cell: Cell, summary: dict[str, Any]) -> None:
        import wandb

        self._started = True
        identity, summary = jsonable(cell.identity), jsonable(summary)
        run = wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            group=cell.experiment,
            name=cell.name,
            mode=self.mode,
            dir=self._folder,
            config=identity,
            tags=[cell.backend, summary["status"]],
            reinit="finish_previous",
            settings=wandb.Settings(
                init_timeout=30,
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )
        try:
            for entry in summary["rounds"]:
                run.log({**entry.get("metrics", {}), "adapter_cost": entry.get("adapter_cost")})
            run.summary.update({name: summary[name] for name in ("status", "reason", "cell")})
            run.summary["git_sha"] = summary["environment"]["git_start"]["sha"]
            for metric, interval in summary.get("intervals", {}).items():
                run.summary[metric] = interval["centre"]
        finally:
            run.finish(exit_code=0 if summary["status"] == "complete" else 1)

    def close(self) -> None:
        """Ends wandb's service; only then is the file of an offline run sure to be whole."""
        if not self._started:
            return
        try:
            import wandb

            wandb.teardown()
        except Exception as error:
            self._warn(f"wandb did not end cleanly ({type(error).__name__}: {error}); the cells are stored")


def has_key() -> bool:
    """Whether wandb would find an API key: in the environment or in the user's netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def make_logger(config: LoggerConfig, folder: str, warn: Callable[[str], None]) -> Logger:
    """The logger that the config names; `folder` is where offline runs are kept."""
    return WandbLogger(config, folder, warn) if config.name == "wandb" else NullLogger()
