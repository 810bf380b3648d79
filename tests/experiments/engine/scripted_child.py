"""A child that follows a script in place of an engine: ``{"command": behaviour}`` in the setup's environment.

Behaviours: "ok" answers; "raise" answers with an error; "die" is killed; "exit" ends with status 3; "hang" never
answers; "slow" gives signs of life first; "orphan" starts a process in the same session and then is killed;
"garbage" is a line that is no answer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


def main() -> int:
    setup = json.loads(Path(sys.argv[1]).read_text())
    script = json.loads(setup["env"]["SCRIPT"])
    with os.fdopen(int(sys.argv[2])) as commands, os.fdopen(int(sys.argv[3]), "w") as answers:
        while line := commands.readline():
            name = json.loads(line)["command"]
            if name == "stop":
                return 0
            behaviour = script.get(name, "ok")
            if behaviour == "die":
                print("torch.OutOfMemoryError: no room left", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if behaviour == "exit":
                return 3
            if behaviour == "hang":
                signal.pause()
            if behaviour == "orphan":
                orphan = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
                Path(script["orphan_pid"]).write_text(str(orphan.pid))
                os.kill(os.getpid(), signal.SIGKILL)
            if behaviour == "slow":
                for _ in range(3):
                    print(json.dumps({"alive": True}), file=answers, flush=True)
            if behaviour == "garbage":
                answers.write("not json\n")
            elif behaviour == "raise":
                answer = {
                    "ok": False,
                    "error": "ValueError",
                    "message": "no such thing",
                    "traceback": "Traceback: here",
                }
                answers.write(json.dumps(answer) + "\n")
            else:
                answers.write(json.dumps({"ok": True, "value": {"command": name}}) + "\n")
            answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
