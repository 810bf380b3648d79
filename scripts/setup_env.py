"""Create or repair the CPU environment `.venv` from requirements/cpu.lock. Standard library only.

A stamp in the environment holds a fingerprint of everything that determines it. While the stamp matches, a
call costs a few milliseconds. Otherwise every locked distribution is checked against its own file list, and
only what is missing, of another version or damaged is installed: an interrupted set-up goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
STAMP = ".tessa-setup"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# CUDA builds of these break a CPU torch, see requirements/cpu.lock.
FORBIDDEN = ("torchvision", "torchaudio", "torchcodec")
Runner = Callable[[Sequence[str]], int]


class SetupError(Exception):
    """The set-up cannot go on; the message tells the user what to do."""


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, str]:
    """Pins of a lock file, {canonical name: "name==version"}. Raises SetupError on any other kind of line."""
    pins: dict[str, str] = {}
    for number, raw in enumerate(path.read_text().splitlines(), 1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+_-]+", line):
            raise SetupError(f"{path}:{number}: expected name==version, found {line!r}")
        pins[canonical(line.split("==")[0])] = line
    return pins


def fingerprint(repo: Path, venv: Path) -> str:
    """Hash of the inputs of the set-up and of the two places: an environment that was moved does not work."""
    digest = hashlib.sha256()
    for part in (str(repo), str(venv), platform.python_version(), platform.machine()):
        digest.update(part.encode() + b"\0")
    for name in ("requirements/cpu.lock", "requirements/vllm_metadata/pyproject.toml", "pyproject.toml"):
        digest.update((repo / name).read_bytes() + b"\0")
    return digest.hexdigest()


def is_intact(dist: Distribution) -> bool:
    """Whether every file that the distribution recorded at its installation is there in its recorded size."""
    files = dist.files
    if not files:
        return False
    for file in files:
        # Compiled files are rewritten at run time; where they are lost Python makes them again.
        if file.size is None or file.suffix == ".pyc":
            continue
        try:
            if os.stat(str(file.locate())).st_size != file.size:
                return False
        except OSError:
            return False
    return True


def to_install(pins: dict[str, str], site: Path) -> list[str]:
    """Lock lines whose distribution is missing from the folder `site`, of another version, or damaged."""
    found: dict[str, Distribution] = {}
    for dist in distributions(path=[str(site)]):
        name = dist.metadata["Name"]
        if name:
            found[canonical(name)] = dist
    wanted = []
    for name, line in pins.items():
        dist_found = found.get(name)
        if dist_found is None or dist_found.version != line.split("==")[1] or not is_intact(dist_found):
            wanted.append(line)
    return wanted


def sweep_leftovers(site: Path) -> None:
    """Remove what an interrupted pip leaves: folders renamed with a tilde, and metadata without a file list.

    pip cannot uninstall a distribution whose file list is missing, and then refuses to replace it.
    """
    for path in site.iterdir():
        broken_metadata = path.name.endswith(".dist-info") and not (path / "RECORD").is_file()
        if path.name.startswith("~") or broken_metadata:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def install_torch(line: str, run_pip: Runner) -> None:
    """Install the CPU build of torch: from where pip is configured to look, else from PyTorch's own index.

    The exact local version (+cpu) is asked for in both, so that a CUDA build of several GB is never taken.
    """
    if run_pip(["install", "--no-deps", line]) == 0:
        return
    index = os.environ.get("TESSA_TORCH_INDEX", TORCH_CPU_INDEX)
    say(f"{line} is not on the configured package index; trying {index}")
    if run_pip(["install", "--no-deps", "--index-url", index, line]) == 0:
        return
    raise SetupError(
        f"could not install {line}: neither the configured package index nor {index} gave it.\n"
        "       Check the network, or download the wheel and point pip at its folder with PIP_FIND_LINKS,\n"
        "       or name another index in TESSA_TORCH_INDEX; then run the same command again."
    )


def child_environment() -> dict[str, str]:
    """The environment without what would make pip install into, or read from, another place than the venv."""
    drop = {"PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"}
    env = {key: value for key, value in os.environ.items() if key not in drop}
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    return env | quiet | {"PYTHONNOUSERSITE": "1"}


def works(python: Path) -> bool:
    """Whether this interpreter starts, is a Python 3.11, and has pip."""
    probe = "import sys, pip; sys.exit(sys.version_info[:2] != (3, 11))"
    try:
        run = subprocess.run([python, "-c", probe], env=child_environment(), capture_output=True)
    except OSError:
        return False
    return run.returncode == 0


def create_venv(venv: Path) -> None:
    """Make an empty environment, replacing whatever lies there."""
    say(f"creating {venv}")
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode != 0:
        raise SetupError(
            f"{sys.executable} could not create a virtual environment:\n{made.stdout}{made.stderr}\n"
            "       On Debian: apt-get install python3.11-venv"
        )


@contextlib.contextmanager
def only_one(repo: Path) -> Iterator[None]:
    """Hold back a second set-up of the same checkout; the lock falls when the process ends in any way."""
    folder = repo / ".cache"
    folder.mkdir(exist_ok=True)
    with open(folder / "setup.lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another set-up of this checkout is running; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def install_metadata_package(repo: Path, run_pip: Runner) -> None:
    """Install the module-less `vllm`, from a scratch copy because setuptools writes beside the sources."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = shutil.copytree(repo / "requirements" / "vllm_metadata", Path(scratch) / "vllm_metadata")
        if run_pip(["install", "--no-deps", "--no-build-isolation", "--force-reinstall", str(copy)]) != 0:
            raise SetupError("could not install the metadata package requirements/vllm_metadata")


def install(repo: Path, venv: Path) -> None:
    """Bring `venv` to the state that the lock describes. Raises SetupError."""
    python = venv / "bin" / "python"

    def run_pip(arguments: Sequence[str]) -> int:
        return subprocess.run([python, "-m", "pip", "-qq", *arguments], env=child_environment()).returncode

    if not works(python):
        create_venv(venv)
    site = venv / "lib" / "python3.11" / "site-packages"
    sweep_leftovers(site)
    present = {canonical(dist.metadata["Name"] or "") for dist in distributions(path=[str(site)])}
    unwanted = [name for name in FORBIDDEN if name in present]
    if unwanted and run_pip(["uninstall", "-y", *unwanted]) != 0:
        raise SetupError(f"could not remove {', '.join(unwanted)}; delete {venv} and run this again")

    wanted = to_install(read_lock(repo / "requirements" / "cpu.lock"), site)
    if wanted:
        say(f"installing {len(wanted)} packages (a fresh set-up takes about 3 minutes and 4.5 GB)")
    # setuptools first: it builds the few packages that come as source; no unpinned builder is fetched.
    for line in [line for line in wanted if canonical(line).startswith("setuptools==")]:
        if run_pip(["install", "--no-deps", "--force-reinstall", line]) != 0:
            raise SetupError(f"could not install {line}; see pip's message above")
    for line in [line for line in wanted if line.startswith("torch==")]:
        install_torch(line, run_pip)
    rest = to_install(read_lock(repo / "requirements" / "cpu.lock"), site)
    if rest:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(rest) + "\n")
            file.flush()
            arguments = ["install", "--no-deps", "--no-build-isolation", "--use-pep517", "--force-reinstall"]
            if run_pip([*arguments, "-r", file.name]) != 0:
                raise SetupError(
                    "pip could not install the locked packages; see its message above.\n"
                    "       After a network failure run the same command again, it goes on where it stopped."
                )
    say("installing the project and the vllm metadata")
    if run_pip(["install", "--no-deps", "--no-build-isolation", "-e", str(repo)]) != 0:
        raise SetupError("could not install the project itself; see pip's message above")
    install_metadata_package(repo, run_pip)
    left = to_install(read_lock(repo / "requirements" / "cpu.lock"), site)
    if left:
        raise SetupError(f"still not as locked: {', '.join(left)}; delete {venv} and run this again")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/setup.sh", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--venv", type=Path, default=REPO / ".venv", help="folder of the environment")
    parser.add_argument("--status", action="store_true", help="print what is missing, change nothing")
    args = parser.parse_args(argv)
    venv = args.venv.absolute()
    stamp = venv / STAMP
    expected = fingerprint(REPO, venv)

    def current() -> bool:
        return stamp.is_file() and stamp.read_text() == expected and (venv / "bin" / "python").exists()

    if args.status:
        site = venv / "lib" / "python3.11" / "site-packages"
        missing = to_install(read_lock(REPO / "requirements" / "cpu.lock"), site)
        print(json.dumps({"current": current(), "missing": missing}))
        return 0
    if current():
        return 0
    try:
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            raise SetupError(
                "the CPU lock is made for Linux on x86-64, "
                f"this is {platform.system()} on {platform.machine()}.\n"
                "       For a machine with a CUDA GPU use environment.yml."
            )
        with only_one(REPO):
            if current():
                return 0
            stamp.unlink(missing_ok=True)
            install(REPO, venv)
            partial = stamp.with_suffix(".part")
            partial.write_text(expected)
            partial.replace(stamp)
    except SetupError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run goes on where this one stopped")
        return 130
    say(f"{venv} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
