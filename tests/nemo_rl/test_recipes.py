# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Shipped recipes, read and validated by NeMo RL's own loader and models; nothing is started."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym_prorl.nemo_rl.configuration import RECIPES, file_of, names_of
from tests.nemo_rl.conftest import ROOT, needs_nemo_rl


NAMES = names_of()
VARIANTS = (None, *names_of("variants"))
SERVICES = ["++prorl.services=['http://127.0.0.1:1']", "++prorl.models=['http://127.0.0.1:2']"]


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(ROOT)
    return Path(ROOT)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text('{"responses_create_params": {"input": [], "tools": [{"type": "function", "name": "f"}]}}\n' * 64)
    return path


def test_the_recipes_that_there_are() -> None:
    assert NAMES == [
        "dapo-code-qwen3-4b",
        "dapo-math-qwen3-4b",
        "dapo-stem-qwen3-4b",
        "dapo-swe-qwen3-14b",
        "dapo-swe-qwen3-30b-a3b",
        "dapo-swe-qwen3-4b",
        "dapo-swe-qwen3-8b",
    ]
    assert names_of("variants") == ["on-policy", "service"]
    assert file_of("dapo-swe-qwen3-4b") == RECIPES / "dapo-swe-qwen3-4b.yaml"
    with pytest.raises(Exception, match="the nearest: dapo-swe-qwen3-4b"):
        file_of("dapo-swe-qwen-4b")


@needs_nemo_rl
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("importable")
def test_nothing_stands_against_a_recipe(name: str, variant: str | None, rows: Path) -> None:
    found = _findings(name, variant, rows)
    # The services of the variant do not exist.
    away = {"prorl.services"} if variant == "service" else set()
    assert {finding.field for finding in found} == away, found


@pytest.mark.parametrize("file", sorted((RECIPES / "models").glob("*.yaml")), ids=lambda file: file.stem)
def test_each_model_says_how_it_writes_calls_and_thoughts(file: Path) -> None:
    model = OmegaConf.load(file).policy
    parsers = model.generation.vllm_cfg.http_server_serving_chat_kwargs
    # All Qwen3 models call in Hermes' format, and reason unless they are instruct models. The prompt of the thinking
    # model opens the reasoning.
    reasoning = {"Instruct-2507": None, "Thinking-2507": "deepseek_r1"}
    name = "-".join(model.model_name.split("-")[-2:])
    assert parsers == {"tool_parser": "hermes", "reasoning_parser": reasoning.get(name, "qwen3")}


@needs_nemo_rl
def test_the_command_tells_everything_before_anything_starts(rows: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    wrong = _command(
        f"data.train.data_path={rows}",
        "grpo.overlong_filtering=true",
        "loss_fn.token_level_loss=false",
        folder=tmp_path,
    )
    print(f"refused after {time.monotonic() - began:.1f} s")
    assert wrong.returncode == 2
    for field in ("grpo.overlong_filtering", "loss_fn.token_level_loss"):
        assert f"error: {field}: " in wrong.stderr
    assert "Not started: 2 errors." in wrong.stderr
    assert "Ray" not in wrong.stderr + wrong.stdout
    good = _command(f"++data.train.data_path={rows}", "--check", folder=tmp_path)
    assert (good.returncode, good.stdout.strip()) == (0, "No errors found: training can start."), good.stderr


@pytest.mark.parametrize(
    ("root", "says"),
    [
        ("", ["NRL_ROOT: the environment variable is not set"]),
        ("/there/is/none", ["there is no NeMo RL in /there/is/none"]),
        ("{bare}", ["No module named 'no_such_a'", "--with: there is no no-such", "2 errors."]),
    ],
)
@pytest.mark.long("a process that imports the trainer's side")
def test_without_a_usable_checkout_it_says_all_that_is_wrong(root: str, says: list[str], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    (bare / "nemo_rl/utils").mkdir(parents=True)
    (bare / "nemo_rl/__init__.py").write_text("__version__ = '0'\n")
    config = "load_config = merge_with_override = parse_hydra_overrides = register_omegaconf_resolvers = print"
    (bare / "nemo_rl/utils/config.py").write_text(f"OverridesError = {config}\n")
    (bare / "nemo_rl/data_plane.py").write_text("import no_such_a\n")
    without = _command("--with", "no-such", folder=tmp_path, root=root.replace("{bare}", str(bare)))
    assert without.returncode == 2
    for each in says:
        assert each in without.stderr


@needs_nemo_rl
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["++grpo=[", "--check"], "overrides"),
        (["grpo.num_prompt_per_step=8"], "num_prompt_per_step"),
        (["--with", "on-polcy"], "the nearest: on-policy"),
        (["--check"], "data.train.data_path: a value is required"),
    ],
)
def test_what_cannot_be_read_is_told(arguments: list[str], says: str, tmp_path: Path) -> None:
    refused = _command(*arguments, folder=tmp_path)
    assert refused.returncode == 2
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr


@needs_nemo_rl
@pytest.mark.usefixtures("importable")
def test_a_recipe_of_ones_own_inherits_from_ours(rows: Path, tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(
        f"defaults: {RECIPES}/dapo-math-qwen3-4b.yaml\n"
        "grpo: {num_prompts_per_step: 16, overlong_filtering: true}\n"
        "logger: {wandb: {name: mine}}\n"
    )
    # The batch follows by itself.
    assert {finding.field for finding in _findings(str(own), None, rows)} == {"grpo.overlong_filtering"}


def _read(name: str, variant: str | None, rows: Path) -> Any:
    from nemo_gym_prorl.nemo_rl.configuration import read

    services = SERVICES if variant == "service" else []
    return read(name, [variant] if variant else [], [f"++data.train.data_path={rows}", *services])


def _findings(name: str, variant: str | None, rows: Path) -> list[Any]:
    from nemo_gym_prorl.nemo_rl import train

    config = _read(name, variant, rows)
    train.complete(config)
    return train.find(config)


def _command(*arguments: str, folder: Path, root: str = ROOT) -> subprocess.CompletedProcess[str]:
    repository = str(Path(__file__).parents[2])
    environment = {**os.environ, "NRL_ROOT": root, "PYTHONPATH": os.pathsep.join([repository, root])}
    return subprocess.run(
        [sys.executable, "-m", "nemo_gym_prorl.nemo_rl.train", "--config", "dapo-swe-qwen3-4b", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=folder,
        env=environment,
    )
