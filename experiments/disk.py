"""What goes wrong with a folder that results are written to, as one line that says what to do."""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections.abc import Iterator
from pathlib import Path

from tessa.errors import UserError


@contextlib.contextmanager
def disk_errors(folder: Path, option: str = "paths.results=...") -> Iterator[None]:
    """Turns the errors of a disk into a UserError; `option` is what chooses another folder."""
    try:
        yield
    except OSError as error:
        elsewhere = f"Choose another folder with {option}"
        advice = {
            errno.ENOSPC: "the disk is full. Free some space and run again; finished cells are kept.",
            errno.EDQUOT: "the quota is used up. Free some space and run again; finished cells are kept.",
            errno.EROFS: f"the file system is read-only. {elsewhere}",
            errno.EACCES: f"no permission to write there. {elsewhere}",
            errno.EPERM: f"no permission to write there. {elsewhere}",
            errno.ENOTDIR: f"a part of that path is a file. {elsewhere}",
            errno.EEXIST: f"a file is in the way. {elsewhere}",
            errno.EFBIG: "a file would be larger than this process may write (ulimit -f). Raise the limit.",
        }.get(
            error.errno or 0,
            f"{error.strerror or error}. Finished cells are kept; run again once it is mended.",
        )
        raise UserError(f"cannot write results to {folder}: {advice}") from error


def writable(folder: Path, option: str = "paths.results=...") -> Path:
    """Makes the folder and returns it; UserError where it cannot be written to."""
    with disk_errors(folder, option):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
        probe.write_bytes(b"x")
        probe.unlink()
    return folder


def check_writable(folder: Path, option: str) -> Path:
    """`writable` before anything is measured: a folder that was not there is not there afterwards either."""
    with disk_errors(folder, option):
        absent = [place for place in (folder, *folder.parents) if not place.exists()]
    writable(folder, option)
    for place in absent:
        with contextlib.suppress(OSError):  # another run may have begun to use it
            place.rmdir()
    return folder
