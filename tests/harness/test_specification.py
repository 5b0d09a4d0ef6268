# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Descriptions of harnesses: their placeholders, and one line for each mistake."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.harness.specification import load_harness, shipped_harnesses


GOOD: dict[str, Any] = {"name": "own", "version": "1", "api": "chat", "command": ["agent", "{prompt}"]}
BUNDLE = {"npm": {"a": "1"}, "before": "2026-01-01"}


def written(folder: Path, **changes: Any) -> str:
    """Write a description and return its path; a field that is ``None`` is left out."""
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in (GOOD | changes).items() if value is not None}))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "../x"}, "name: String should match"),
        ({"command": ["a", "{promt}"]}, "command: .*{promt} is no placeholder; the nearest: prompt"),
        ({"env": {"A": "{keys}"}}, "env: .*{keys} is no placeholder; the nearest: key"),
        ({"command": ["a", "${promt}"]}, "command: .*write {{promt}} for a literal {promt}"),
        ({"command": ["a", "{{prompt}}"]}, "body: .*no text .* has {prompt}"),
        ({"env": {"A; touch /x; B": "c"}}, "env.*String should match"),
        ({"files": {"a": "b"}}, "files: .*a must begin with / or ~/"),
        ({"exit_codes": {3: "Out of time"}}, "exit_codes.3: String should match"),
        ({"bundle": {"before": "2026-01-01"}}, "bundle: .*packages of npm or of pip"),
        ({"bundle": {**BUNDLE, "npm": {"../../etc": "1"}}}, "bundle.npm.*String should match"),
        ({"bundle": {**BUNDLE, "npm": {}, "pip": ["-r x"]}}, "bundle.pip.0: String should match"),
        ({"prompts": "x"}, "prompts: Extra inputs"),
    ],
)
def test_a_mistake_is_told_in_one_line_with_its_field(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CallerError, match=f"own.yaml: {says}") as caught:
        load_harness(written(tmp_path, **changes))
    assert "\n" not in caught.value.reason


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("codx", "no harness 'codx'; the nearest: codex; there are: claude-code, "),
        ("../codex", "no harness '../codex'"),
        ("none.yaml", "no harness 'none.yaml'"),
        ("broken.yaml", "broken.yaml can't be read: while parsing"),
        ("latin.yaml", "latin.yaml can't be read: 'utf-8' codec"),
    ],
    ids=lambda text: text[-30:],
)
def test_a_harness_that_is_not_there(name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file, content in (("broken", b"name: ["), ("latin", b"name: caf\xe9")):
        (tmp_path / f"{file}.yaml").write_bytes(content)
    with pytest.raises(CallerError, match=re.escape(says)) as caught:
        load_harness(name)
    assert "\n" not in caught.value.reason


def test_a_text_is_filled_once_and_other_braces_stay(tmp_path: Path) -> None:
    texts = {"A": '{"a": {context}} ${{home}} {key}', "B": "{base_url} {origin} {model}"}
    code = 'print(f"{error} {{model}} {error!r} {x.y}")'
    files = {"~/a~": "{bundle}{musl}", "/b": "${home}", "~/c.py": code}
    harness = load_harness(written(tmp_path, env=texts, files=files))
    prompt = "say {model} and {key}, {} {0} {nothing}"
    launch = harness.launch(prompt=prompt, origin="http://127.0.0.1:9", model="m", home="/h", context=5, libc="musl")
    assert launch.command == ["agent", prompt]
    assert launch.env == {
        "HOME": "/h",
        "A": '{"a": 5} ${home} sk-sandbox',
        "B": "http://127.0.0.1:9/v1 http://127.0.0.1:9 m",
    }
    filled = 'print(f"{error} {model} {error!r} {x.y}")'
    assert launch.files == {"/h/a~": "/opt/harness/musl-musl", "/b": "$/h", "/h/c.py": filled}


@pytest.mark.parametrize("name", shipped_harnesses())
def test_shipped_harnesses_leave_nothing_unfilled(name: str) -> None:
    harness = load_harness(name)
    assert harness.name == name
    assert harness.bundle is not None
    launch = harness.launch(
        prompt="fix it", origin="http://127.0.0.1:9", model="m", home="/h", context=777, libc="glibc"
    )
    texts = [*launch.command, *launch.env.values(), *launch.files.values()]
    assert not [text for text in texts if re.search(r"\{[a-z_]+\}", text)]
    assert any("fix it" in word for word in launch.command)
    assert any("http://127.0.0.1:9" in text for text in texts)
    assert name == "mini-swe-agent" or any("777" in text for text in texts)
    for path, text in launch.files.items():
        (tomllib.loads if path.endswith(".toml") else json.loads)(text)
