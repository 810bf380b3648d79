"""A newcomer follows README.md and CONTRIBUTING.md from top to bottom: every command in them works or says its needs.

Commands run as they stand, but cheaply: `run.py` as a dry run, `make` with -n, benchmarks with --help, and `analysis`
on a small store in a folder of the test's own. A command that no rule below knows is an error unless it is marked.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import analysis_store
import pytest
import readme_text
import yaml
from hydra import compose, initialize_config_dir
from tests_support import outside_make

from analysis.__main__ import main as analysis_main
from experiments import cli, config

REPO = Path(__file__).resolve().parents[1]
FILES = ("README.md", "CONTRIBUTING.md")
COMMANDS = list(dict.fromkeys(c for name in FILES for c in readme_text.commands(REPO / name)))
FILLED = {"NAME": "tp_scaling", "tp=N": "tp=2", "FOLDER": "results", "…": ""}
"""What stands for a value of the reader's own."""


def words(command: str) -> list[str]:
    for name, value in FILLED.items():
        command = re.sub(rf"(?<![A-Z]){re.escape(name)}(?![A-Z])", value, command)
    return shlex.split(command)


def make(command: str, folder: Path) -> None:
    """make finds the target, and every script that it would start is there."""
    done = subprocess.run(
        [*words(command), "-n"], cwd=REPO, env=outside_make(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        for script in re.findall(r"(?<!\S)(?:scripts/[\w.]+|run\.py)", line):
            assert (REPO / script).is_file(), script


def run_py(command: str, folder: Path) -> None:
    """The command's configuration composes, its plan holds, and its cells are listed. A sweep: its first job."""
    given = words(command)[2:]
    mode = given.pop(0) if given[0] in ("run", "status") else "run"
    swept = "-m" in given
    given = [word for word in given if word != "-m" and not word.startswith("hydra/launcher=")]
    if swept:
        given = [re.sub(r"^(\w+=[^,\[]+),[^\[]*$", r"\1", word) for word in given]
    config.register()
    with initialize_config_dir(config_dir=str(REPO / "conf"), version_base="1.3"):
        composed = compose("config", overrides=[*given, f"paths.results={folder}/results"])
    composed.dry_run = mode == "run"
    assert cli.execute(composed, mode=mode, factory=_no_engine) == 0


def _no_engine(*_: object) -> None:
    raise AssertionError("a dry run asked for an engine")


def analysis(command: str, folder: Path) -> None:
    for stored in (REPO / "results").glob("reference*"):
        if not stored.name.startswith("reference-run"):
            (folder / "results" / stored.name).mkdir(parents=True, exist_ok=True)
    if words(command)[3] == "readme":
        shutil.copy(REPO / "README.md", folder)
        shutil.copy(REPO / "results" / "README.md", folder / "results")
    assert analysis_main(words(command)[3:]) == 0


def module_help(command: str, folder: Path) -> None:
    """The module starts, and its help knows the options given."""
    given = words(command)
    done = subprocess.run(
        [sys.executable, *given[1:3], "--help"], cwd=REPO, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for option in (word for word in given[3:] if word.startswith("--")):
        assert option in done.stdout or given[2] == "tessa.lm_eval", option


def jupytext(command: str, folder: Path) -> None:
    (folder / "analysis").symlink_to(REPO / "analysis")
    given = words(command)
    done = subprocess.run([sys.executable, *given[1:]], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / given[given.index("--output") + 1]).is_file()


def activate(command: str, folder: Path) -> None:
    """It activates the environment that the set-up makes and make uses."""
    python = Path(words(command)[1]).with_name("python")
    assert f"\nPY := {python}\n" in (REPO / "Makefile").read_text()


def conda(command: str, folder: Path) -> None:
    """Not run: the file is there and bears the name that is activated."""
    given = words(command)
    if given[1] == "env":
        assert (REPO / given[-1]).is_file()
    else:
        assert yaml.safe_load((REPO / "environment.yml").read_text())["name"] == given[-1]


def elsewhere(command: str, folder: Path) -> None:
    """tests/test_readme_snippets.py runs it on a real engine; its arguments are vLLM's."""
    assert command == readme_text.serve_command(REPO / "README.md")


RULES: dict[str, Callable[[str, Path], None]] = {
    r"make [\w -]": make,
    r"python run\.py ": run_py,
    r"python -m analysis ": analysis,
    r"python -m (experiments|tessa)\.": module_help,
    r"python -m jupytext ": jupytext,
    r"\. \.venv": activate,
    r"conda ": conda,
    r"vllm serve ": elsewhere,
}


def rule(command: str) -> Callable[[str, Path], None] | None:
    return next((check for pattern, check in RULES.items() if re.match(pattern, command)), None)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.text[:70])
def test_every_command_works_or_says_what_it_needs(
    command: readme_text.Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if "trace_replay" in command.text:
        monkeypatch.setenv("TESSA_SHARED", str(request.getfixturevalue("shared_dir").resolve()))
    check = rule(command.text)
    if check is None:
        assert command.marked, (
            f"no test runs `{command.text}`; mark it with *Needs ...* or write a rule for it"
        )
        return
    base = [100.0, 104.0]
    analysis_store.write_cell(tmp_path, "base", base)
    analysis_store.write_cell(tmp_path, "tessa", [95.0, 97.0], base=base)
    shutil.copytree(tmp_path / "results", tmp_path / "other-results")
    monkeypatch.chdir(tmp_path)
    check(command.text, tmp_path)


@pytest.mark.parametrize("command", [c for c in COMMANDS if rule(c.text) is conda], ids=lambda c: c.text)
def test_what_is_not_run_is_marked(command: readme_text.Command) -> None:
    assert command.marked


def test_launchers_in_commands_are_marked_and_exist() -> None:
    for command in COMMANDS:
        for launcher in re.findall(r"hydra/launcher=(\w+)", command.text):
            assert command.marked
            assert (REPO / "conf" / "hydra" / "launcher" / f"{launcher}.yaml").is_file()


def test_every_experiment_and_backend_is_in_the_readme() -> None:
    text = (REPO / "README.md").read_text()
    said = "\n".join(command.text for command in COMMANDS)
    for file in (REPO / "conf" / "experiment").glob("*.yaml"):
        if tracked(file):
            assert f"`{file.stem}`" in text, f"the table of experiments lacks {file.stem}"
            if not file.stem.startswith(
                "quality_"
            ):  # they need models and data that do not come with the project
                assert f"experiment={file.stem}" in said, f"no command runs {file.stem}"
    for file in (REPO / "conf" / "backend").glob("*.yaml"):
        assert f"`{file.stem}`" in text or f"backend={file.stem}" in text, (
            f"README says nothing of {file.stem}"
        )


def tracked(file: Path) -> bool:
    """Files that are still being written are their author's business; outside of git all count."""
    done = subprocess.run(["git", "ls-files", "--error-unmatch", str(file)], cwd=REPO, capture_output=True)
    return done.returncode == 0 or not (REPO / ".git").exists()


@pytest.mark.parametrize("name", FILES)
def test_files_and_links_that_are_named_exist(name: str) -> None:
    text = readme_text.FENCE.sub("", (REPO / name).read_text())
    for target in re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r'src="([^"]+)"', text):
        assert (REPO / target).exists(), target
    for path in re.findall(
        r"`((?:conf|scripts|tests|tessa|experiments|baselines|requirements|analysis)/[\w./]*)`", text
    ):
        assert (REPO / path).exists(), path


def test_the_reader_of_commands_sees_all_forms(tmp_path: Path) -> None:
    file = tmp_path / "X.md"
    file.write_text(
        "text `make demo` and `python run.py\nexperiment=a` here\n\n"
        "*Needs GPUs.*\n\n```bash\na b \\\n  c   # comment\nd && e '#f'\n```\n\n```python\nmake x\n```\n"
    )
    assert readme_text.commands(file) == [
        readme_text.Command("a b c", True),
        readme_text.Command("d", True),
        readme_text.Command("e '#f'", True),
        readme_text.Command("make demo", False),
        readme_text.Command("python run.py experiment=a", False),
    ]
