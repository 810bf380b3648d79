"""The processes of an engine on a machine that does not drive it: vLLM's executor without a scheduler.

Started by `experiments.engine.node` as ``python -m experiments.engine.follower ARGUMENTS.json``, with the same engine
arguments as the driving machine but for ``node_rank``. It is what ``vllm serve --headless`` does, for the arguments
of a Python engine.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tessa.vllm.lifetime import die_with_parent


def main(argv: list[str]) -> int:
    if os.environ.get("TESSA_DIE_WITH_PARENT") == "1":
        die_with_parent()
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    arguments = AsyncEngineArgs(**json.loads(Path(argv[0]).read_text()))
    # The context decides default batch sizes, so it must be the one of `AsyncLLM.from_engine_args`.
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT, headless=True)
    executor = MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)  # returns when a worker has died
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
