# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Messages about missing extras, before any slow import."""

import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym_prorl import tasks
from nemo_gym_prorl.cli.environments import check_extras
from nemo_gym_prorl.failures import InfrastructureError


APP = Path(__file__).parents[2] / "resources_servers/prorl_math/app.py"


HIDDEN = (
    "import importlib.util, runpy, sys; found = importlib.util.find_spec; sys.modules['math_verify'] = None\n"
    "importlib.util.find_spec = lambda name, *of: None if name == 'math_verify' else found(name, *of)\n"
)


@pytest.mark.parametrize(
    ("started", "says"),
    [
        (
            "sys.argv = ['prorl', 'serve', 'prorl_math', '--policy-model=m']; from nemo_gym_prorl.cli.app import main",
            "prorl",
        ),
        ("sys.argv = ['prorl', 'data', 'math', 'set.jsonl']; from nemo_gym_prorl.cli.app import main", "prorl"),
        (f"main = lambda: runpy.run_path({str(APP)!r}, run_name='__main__')", "prorl_math"),
    ],
    ids=["prorl serve", "prorl data math", "the server itself"],
)
def test_missing_extra_is_one_line_on_stderr(started: str, says: str, tmp_path: Path) -> None:
    told = "sys.stdout.write(' '.join({'aiohttp', 'fastapi', 'nemo_gym'} & set(sys.modules)))"
    code = f"{HIDDEN}{started}\ntry: main()\nfinally: {told}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 1
    assert done.stdout == ""  # nothing was imported that takes seconds
    assert done.stderr == f"{says}: not installed: math_verify. pip install 'nemo-gym-prorl[math]'\n"


def test_mixture_reports_all_missing_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    check_extras(["prorl_mixture", "prorl_code", "no_such_environment"])
    find = tasks.importlib.util.find_spec
    there = ("nemo_gym", "nemo_gym_prorl")
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: find(name) if name in there else None)
    check_extras(["prorl_code"])
    with pytest.raises(InfrastructureError, match=r"math_verify, bm25s.*swebench\. pip install '.*\[math,stem,swe\]'"):
        check_extras(["prorl_mixture"])
