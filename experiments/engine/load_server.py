"""What every engine's process answers alike: running a workload, whatever client the engine has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class LoadServer:
    """The commands ``warmup`` and ``run``; subclasses make `client` when they start.

    Attributes:
        client: an `experiments.measure.types.Client`.
        names: the adapters' names by index, empty where every request goes to the base model.
    """

    client: Any = None
    names: Sequence[str] = ()

    async def warmup(self, workload: str) -> dict[str, Any]:
        """Run a workload that uses every adapter; nothing of it is reported."""
        result = await self._run(workload, {})
        errors = [record.error for record in result.records if record.error]
        if result.status != "ok" or errors:
            raise RuntimeError(f"warm-up: {result.reason or errors[0]}")
        return {}

    async def run(self, workload: str, options: Mapping[str, Any], records: str) -> dict[str, Any]:
        """Run a workload once and write one record per request to ``records``."""
        from experiments.measure.types import records_to_frame

        result = await self._run(workload, options)
        records_to_frame(result.records).to_parquet(records)
        return {
            "wall_s": result.wall_s,
            "status": result.status,
            "reason": result.reason,
            "mode": result.mode,
        }

    async def close(self) -> None:
        """Called last, when no more commands come."""

    def before_load(self) -> None:
        """Called before each workload."""

    async def _run(self, workload: str, options: Mapping[str, Any]) -> Any:
        from experiments.measure.load import LoadOptions, run_load
        from experiments.workload.types import Workload

        if self.client is None:
            raise RuntimeError("the engine has not been started")
        self.before_load()
        limit = options.get("max_in_flight")
        load = LoadOptions(
            adapter_names=list(self.names),
            base_only=not self.names,
            mode="closed_loop" if limit else None,
            concurrency=limit,
            request_timeout_s=options.get("request_timeout_s", 600.0),
            stall_timeout_s=options.get("stall_timeout_s", 120.0),
        )
        return await run_load(self.client, Workload.load(workload), load)
