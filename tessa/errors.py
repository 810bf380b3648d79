"""The one exception type for mistakes a user can fix."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: the message says what was given, what is allowed, and what to do next.

    Command-line entry points print the message alone, without a traceback, and exit with status 2.
    """
