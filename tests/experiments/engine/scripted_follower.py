"""Stands for a node's part of an engine: waits, or does what $FOLLOWER says."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def main() -> int:
    arguments = json.loads(Path(sys.argv[1]).read_text())
    print(
        "follower",
        json.dumps(arguments),
        os.environ["VLLM_HOST_IP"],
        os.environ["GLOO_SOCKET_IFNAME"],
        flush=True,
    )
    if os.environ.get("FOLLOWER") == "fail":
        print("torch.OutOfMemoryError: no room on the second machine", flush=True)
        return 1
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
