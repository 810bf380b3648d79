"""Runs the jobs of a sweep elsewhere: through Slurm, or as processes of this machine.

Jobs are `run.py` with one combination of the sweep's overrides. They write their cells to the results folder;
what comes back is read from there, never from a job's return value.
"""

from __future__ import annotations

looking = False
"""Set by run.py for modes that only look (`status`): they are done in place, nothing is submitted."""

exit_codes: list[int] = []
"""Exit status of every sweep launched by this process, for run.py's own."""
