# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What test scripts download, and a folder from which they install without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nemo_gym_prorl.cli.image import tools as maker
from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.tasks.harbor.verifier_tools import RequirementSet, VerifierNeeds, needs_of, verifier_environment
from tests.prorl_code.conftest import serving
from tests.tasks.harbor.folders import make_task, play, row_of


VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
USUAL = """\
#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh
source $HOME/.local/bin/env
# uvx -w commented
uvx \\
  -p 3.13 \\
  -w pytest==8.4.1 \\
  -w a==1 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -w -rA
"""


@pytest.mark.parametrize(
    ("script", "needs"),
    [
        (USUAL, VerifierNeeds((RequirementSet("3.13", ("a==1", "pytest==8.4.1")),))),
        ("pip install b a==1 -q --target /x && pytest", VerifierNeeds((RequirementSet("", ("a==1", "b")),))),
        ("X=1 pip3 install 'a>=1,<2' .", VerifierNeeds((RequirementSet("", ("a>=1,<2",)),))),
        ("uv venv -p 3.12 v\nuv pip install a", VerifierNeeds((RequirementSet("3.12", ("a",)),))),
        (
            "uv init -p 3.12\nuv add b==1\nuv add --dev a && uv run pytest -p c",
            VerifierNeeds((RequirementSet("3.12", ("a", "b==1"), project=True),)),
        ),
        ("uv run --with=a --python=3.11 pytest", VerifierNeeds((RequirementSet("3.11", ("a",)),))),
        ("uvx --index https://x/y --with a,b t", VerifierNeeds((RequirementSet("", ("a", "b")),))),
        ("apt-get -qq install -y --no-install-recommends gcc curl", VerifierNeeds(apt=("gcc",))),
        ("curl -o x https://example.org/x", VerifierNeeds(urls=("https://example.org/x",))),
        ("if ! sudo git clone https://x/y; then exit 1; fi", VerifierNeeds(urls=("https://x/y",))),
        ("echo 'no end\npip install a", VerifierNeeds((RequirementSet("", ("a",)),))),
    ],
)
def test_what_a_script_downloads(script: str, needs: VerifierNeeds) -> None:
    assert needs_of(script) == needs


def wheel(folder: Path, name: str, text: str = "", requires: str = "") -> None:
    info = f"{name}-1.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{name}.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}={name}:main\n",
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        for path, contents in files.items():
            archive.writestr(path, contents)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD")))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of tools with a Python of this machine; packages come from a folder of wheels, not from the network."""
    wheel(tmp_path / "index", "checker", "import needed\n\ndef main():\n    print(needed.said)\n", "needed")
    wheel(tmp_path / "index", "needed", "said = 'it ran'\n", "elsewhere; sys_platform == 'win32'")
    wheel(tmp_path / "index", "elsewhere")
    python = tmp_path / "python"
    base = Path(sys.base_prefix)
    (python / "bin").mkdir(parents=True)
    for program in (base / "bin").glob("python3*"):
        shutil.copy2(program, python / "bin", follow_symlinks=False)
    (python / "lib").symlink_to(base / "lib")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    folder = tmp_path / "tools"
    sets = [RequirementSet(VERSION, ("checker==1",), project=True), RequirementSet("", ("none-of-this-name",))]
    problems = maker.make_tools(folder, sets, [str(python)], lambda _line: None)
    assert len(problems) == 1
    assert problems[0].startswith("none-of-this-name: the wheels can't be downloaded: ")
    shutil.rmtree(tmp_path / "index")
    return folder


def test_a_verifier_installs_from_the_folder_alone(tools: Path, tmp_path: Path) -> None:
    for path in (tools, *tools.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
    for number, script in enumerate(
        (
            f"uvx -p {VERSION} -w checker==1 checker",
            f"uv init --bare -p {VERSION} && uv add checker==1 && uv run checker",
        )
    ):
        home = tmp_path / f"home{number}"
        for name in (".config/uv/uv.toml", ".config/pip/pip.conf"):  # of an agent
            (home / name).parent.mkdir(parents=True)
            (home / name).write_text("broken")
        environ = verifier_environment(str(tools), str(tmp_path / f"scratch{number}"))
        environ |= {"HOME": str(home), "PATH": f"{tools}/bin:/usr/bin:/bin"}
        command = ["bash", "-c", f"cd; {script}; command -v python3 pip"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.stdout.splitlines()[0] == "it ran", done.stderr
        assert str(tools) not in done.stdout
        assert (home / ".local").exists() is False


@pytest.mark.sandbox
async def test_a_verifier_that_lacks_its_tools_says_what_to_do(tmp_path: Path) -> None:
    script = "uvx -p 3.13 -w a==1 pytest --ctrf /logs/verifier/ctrf.json\napt-get install -y gcc\n"
    folder = make_task(tmp_path / "t", test=f"#!/bin/bash\n{script}echo 0 > /logs/verifier/reward.txt\n")
    row = row_of(folder)
    assert row["harbor"]["downloads"] == {"sets": [{"python": "3.13", "packages": ["a==1"]}], "apt": ["gcc"]}
    async with serving("prorl_harbor") as base_url:
        status, problem, kind = await play(base_url, row, "true")
    assert (status, kind) == (422, "verifier_error")
    assert "so set verifier_tools (prorl image tools); the tests install gcc, which the" in problem["detail"]


def test_the_doctor_says_what_tests_need(tools: Path, tmp_path: Path) -> None:
    scripts = {
        "a": f"uvx -p {VERSION} -w checker==1 checker",
        "b": "apt install gcc",
        "c": "wget https://x/y",
        "d": "exit",
    }
    for name, script in scripts.items():
        (tmp_path / "tasks" / name / "tests").mkdir(parents=True)
        (tmp_path / "tasks" / name / "tests/test.sh").write_text(script)
    said = [check.found for check in maker.check_tasks(tmp_path / "tasks", tools)]
    assert said == [
        f"1 of 4 install Python packages; {tools} has them",
        "1 install packages of the distribution: b: gcc",
        "1 download files: c: https://x/y",
    ]
    script = f"uvx -p {VERSION} -w checker==1 -w needed -w none t; uvx -p 0.1 -w needed t; uv init; uv add needed"
    (tmp_path / "tasks/d/tests/test.sh").write_text(script)
    (tools / "wheels/needed-1-py3-none-any.whl").unlink()
    first, *_ = maker.check_tasks(tmp_path / "tasks", tools)
    lacks = "checker==1; needed; none; Python 0.1"
    assert first.found == f"2 of 4 install Python packages; {tools} lacks {lacks}"


@pytest.mark.parametrize(
    ("pythons", "error", "says"),
    [
        (["/none"], CallerError, "/none is no installation of Python"),
        (["0.1"], InfrastructureError, "Python 0.1 can't be installed; name a folder with bin/python3 by --python"),
    ],
)
def test_a_python_that_cannot_be_had(pythons: list[str], error: type[Exception], says: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=says):
        maker.make_tools(tmp_path / "tools", [], pythons, lambda _line: None)
