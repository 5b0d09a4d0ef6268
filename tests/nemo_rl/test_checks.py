# SPDX-License-Identifier: Apache-2.0
"""What is looked at before a start, without NeMo RL: each mistake is found, and by the name of its field."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from nemo_gym_prorl.nemo_rl.checks import Finding, around, check
from nemo_gym_prorl.nemo_rl.checks.finding import at
from nemo_gym_prorl.nemo_rl.checks.gym_files import GymBlocks, read_gym
from nemo_gym_prorl.nemo_rl.checks.keys import Keys, keys_of_file, keys_of_model, merged, unknown_keys
from nemo_gym_prorl.nemo_rl.settings import ProrlSettings, settings_of
from nemo_gym_prorl.nemo_rl.shaping import Shaping
from tests.nemo_rl.mistakes import MISTAKES, Mistake, changed, good, gym_of


KNOWN: Keys = keys_of_file(good() | {"env": {}})


def findings_of(config: dict[str, Any]) -> list[Finding]:
    return check(config, gym_of(config), KNOWN)


@pytest.mark.parametrize("variant", [None, "synchronous", "service"])
def test_nothing_stands_against_a_good_configuration(variant: str | None) -> None:
    assert findings_of(good(variant)) == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_named_by_its_field(mistake: Mistake) -> None:
    found = {finding.field: str(finding) for finding in findings_of(changed(good(mistake.variant), mistake.changes))}
    assert mistake.named in found, found
    assert mistake.says in found[mistake.named]


def test_all_mistakes_are_told_at_once() -> None:
    several = ["grpo.num_prompt_per_step", "loss_fn.token_level_loss", "grpo.val_at_end", "prorl.agent"]
    made = [next(mistake for mistake in MISTAKES if mistake.named == field) for field in several]
    config = good()
    for mistake in made:
        config = changed(config, mistake.changes)
    assert set(several) <= {finding.field for finding in findings_of(config)}


def test_a_key_that_sources_mention_is_told_and_not_refused() -> None:
    config = changed(good(), {"policy.generation.vllm_cfg.hidden": 1})
    [finding] = check(config, gym_of(config), KNOWN, lambda key: key == "hidden")
    assert not finding.fatal
    assert finding.field == "policy.generation.vllm_cfg.hidden"


# What NeMo RL reads


class Inner(TypedDict):
    size: int
    more: NotRequired[dict[str, Any]]


class Model(BaseModel, extra="allow"):
    inner: Inner
    maybe: Annotated[Inner | None, "as annotations are"] = None
    either: dict[str, Any] | bool = False
    plain: Literal["a", "b"] = "a"


def test_keys_of_models_and_files() -> None:
    known = merged(
        keys_of_model(Model), keys_of_file({"inner": {"own": 1, "more": {"x": 1}}, "free": {}, "plain": "a"})
    )
    good_ones = {"inner": {"size": 1, "own": 2, "more": {"anything": 1}}, "free": {"a": {"b": 1}}, "either": {"a": 1}}
    assert list(unknown_keys(good_ones | {"maybe": {"size": 1}}, known, lambda key: False)) == []
    wrong = {"iner": 1, "inner": {"siz": 1}, "maybe": {"sise": 1}}
    found = {finding.field for finding in unknown_keys(wrong, known, lambda key: False)}
    assert found == {"iner", "inner.siz", "maybe.sise"}


def test_a_sampler_of_somebodys_own_has_any_keys() -> None:
    sampler = {"name": "custom", "target": "mine:Sampler", "whatever": 1}
    assert findings_of(changed(good(), {"async_rl.sampler": sampler})) == []


# Gym's files


def test_files_are_found_merged_and_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text(
        "config_paths: [b.yaml]\nagent: {x: {y: {steps: 1, url: '${policy_base_url}'}}}\n"
    )
    (tmp_path / "b.yaml").write_text("other: {key: '${oc.env:PRORL_THERE_IS_NONE}'}\n")
    own = {"config_paths": ["a.yaml", "c.yaml"], "agent": {"x": {"y": {"steps": 2}}}}
    blocks = read_gym({"env": {"nemo_gym": own}}, [tmp_path])
    assert at(blocks.files, "agent.x.y.steps") == 1
    assert blocks.merged["agent"] == {"x": {"y": {"steps": 2, "url": ""}}}
    told = {finding.field: finding.what for finding in blocks.findings}
    assert "there is no c.yaml" in told["env.nemo_gym.config_paths[1]"]
    assert "PRORL_THERE_IS_NONE" in told["env.nemo_gym.other"]


@pytest.mark.parametrize("domain", ["swe", "math", "stem", "code"])
def test_our_own_files_are_found(domain: str) -> None:
    path = f"resources_servers/prorl_{domain}/configs/prorl_{domain}.yaml"
    model = "responses_api_models/prorl_model/configs/prorl_model.yaml"
    blocks = read_gym({"env": {"nemo_gym": {"config_paths": [path, model]}}})
    assert blocks.findings == []
    assert at(blocks.merged, f"prorl_{domain}_agent.responses_api_agents.prorl_agent.entrypoint") == "app.py"


# What there is besides


def test_rows_are_looked_at(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    config = changed(good(), {"data.train.data_path": str(rows)})

    def found() -> dict[str, str]:
        return {finding.field: str(finding) for finding in around.rows(config, settings_of(config))}

    assert "No such file" in found()["data.train.data_path"]
    rows.write_text("")
    assert "no rows" in found()["data.train.data_path"]
    rows.write_text("{]\n")
    assert "no JSON" in found()["data.train.data_path"]
    good_row = '{"responses_create_params": {"input": []}}\n'
    for bad in (
        "\n",
        "\ufeff",
        "{",
        "[1]",
        '{"input": 1}',
        '{"responses_create_params": {"max_output_tokens": "many"}}',
    ):
        rows.write_text(3 * good_row + bad)
        assert f"line 4 of {rows}" in found()["data.train.data_path"], bad
    rows.write_text('{"prompt": "?"}\n')
    assert "responses_create_params" in found()["data.train.data_path"]
    # 10 epochs of 3 rows are 3 steps of 8 prompts, and 5 are wanted.
    rows.write_text('{"responses_create_params": {}}\n' * 3)
    assert "after 3 of 5 steps" in found()["grpo.max_num_epochs"]
    assert "At least 14" in found()["grpo.max_num_epochs"]
    rows.write_text('{"responses_create_params": {}}\n' * 4)
    assert found() == {}


@pytest.mark.parametrize(
    ("said", "lacking"),
    [
        (None, ["tool_parser", "reasoning_parser"]),
        ({}, ["tool_parser", "reasoning_parser"]),
        ({"tool_parser": None, "reasoning_parser": "qwen3"}, ["tool_parser"]),
        ({"tool_parser": "hermes"}, ["reasoning_parser"]),
        ({"tool_parser": "hermes", "reasoning_parser": None}, []),
    ],
)
def test_rows_with_tools_need_parsers(tmp_path: Path, said: Any, lacking: list[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    field = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
    config = changed(good(), {"data.train.data_path": str(rows), field: said})

    def found() -> list[str]:
        return [finding.field for finding in around.rows(config, settings_of(config)) if finding.fatal]

    rows.write_text('{"responses_create_params": {"tools": []}}\n' * 4)
    assert found() == []
    with rows.open("a") as file:
        file.write('{"responses_create_params": {"tools": [{"type": "function", "name": "f"}]}}\n')
    assert found() == [f"{field}.{name}" for name in lacking]


async def test_services_that_do_not_answer_are_told_in_seconds(
    monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setattr(around, "ANSWER_S", 0.5)
    monkeypatch.setenv("PRORL_ANY_KEY", "right")

    async def guarded(request: web.Request) -> web.Response:
        wrong = request.headers.get("Authorization") != "Bearer right"
        return web.json_response({"stages": {}, "backends": []}, status=401 if wrong else 200)

    async def hangs(request: web.Request) -> web.Response:
        import asyncio

        await asyncio.sleep(60)
        return web.Response()

    async def other(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    app = web.Application()
    for path in ("/status", "/v1/backends"):
        app.router.add_get("/right" + path, guarded)
        app.router.add_get("/hangs" + path, hangs)
        app.router.add_get("/other" + path, other)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    nobody = f"http://127.0.0.1:{unused_tcp_port}"

    def asked(key_env: str | None, *services: str) -> ProrlSettings:
        return ProrlSettings(services=services, models=(f"{url}/right",), key_env=key_env)

    try:
        assert await around.services(asked("PRORL_ANY_KEY", f"{url}/right")) == []
        found = await around.services(asked(None, nobody, f"{url}/hangs", f"{url}/other", f"{url}/right"))
        told = {finding.field: finding.what for finding in found}
        assert "can't be reached" in told["prorl.services[0]"]
        assert "within 0.5 s" in told["prorl.services[1]"]
        assert "no prorl_agent" in told["prorl.services[2]"]
        assert "refuses the key" in told["prorl.services[3]"]
        assert "refuses the key" in told["prorl.models[0]"]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("variant", [None, "service"])
def test_a_key_that_is_not_set_is_told_wherever_the_servers_are(
    variant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRORL_NO_SUCH_KEY", raising=False)
    config = changed(good(variant), {"prorl.key_env": "PRORL_NO_SUCH_KEY"})
    findings = around.check(config, settings_of(config))
    assert "prorl.key_env" in {finding.field for finding in findings if finding.fatal}


def test_a_key_that_is_not_set_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRORL_NO_SUCH_KEY", raising=False)
    [finding] = around.key(ProrlSettings(key_env="PRORL_NO_SUCH_KEY"))
    assert finding.field == "prorl.key_env"


# Shaping


@given(reward=st.floats(-3, 3), length=st.integers(0, 5000))
def test_shaping_of_rewards(reward: float, length: int) -> None:
    block = {"overlong": {"max_sequence_length": 1000, "buffer_length": 200, "penalty": 0.5}, "reward_scaling": {}}
    scaled = Shaping(ProrlSettings.model_validate(block).reward_scaling)(reward, length)
    shaped = Shaping.of(ProrlSettings.model_validate(block))(reward, length)
    assert -1 <= scaled <= 1
    assert scaled - 0.5 <= shaped <= scaled
    if length <= 800:
        assert shaped == scaled
    if length >= 1000:
        assert shaped == scaled - 0.5
    assert Shaping()(reward, length) == reward


@pytest.mark.parametrize(
    ("reward", "length", "trained"), [(1.0, 0, 1.0), (0.0, 0, -1.0), (0.5, 900, -0.25), (1.0, 2000, 0.5)]
)
def test_shaping_by_hand(reward: float, length: int, trained: float) -> None:
    block = {"overlong": {"max_sequence_length": 1000, "buffer_length": 200, "penalty": 0.5}, "reward_scaling": {}}
    assert Shaping.of(ProrlSettings.model_validate(block))(reward, length) == trained


def test_no_block_is_the_default() -> None:
    assert settings_of({}) == settings_of({"prorl": None}) == ProrlSettings()


def test_no_servers_at_all() -> None:
    found = {finding.what for finding in check(good(), GymBlocks(), KNOWN)}
    assert any(what.startswith("there is no such prorl_agent") for what in found)
    assert "none of the files has a prorl_model" in found


# Whatever stands there


def places(config: Any, path: str = "") -> Iterator[str]:
    """Every key, of blocks and of values."""
    for key, value in config.items():
        here = f"{path}.{key}" if path else key
        yield here
        if isinstance(value, dict):
            yield from places(value, here)


@pytest.mark.parametrize("garbage", ["x", None, [], {}, -1, 0, True, [1], {"x": {"y": 1}}, 1e400], ids=repr)
@pytest.mark.parametrize("variant", [None, "synchronous", "service"])
def test_anything_anywhere_gives_findings_and_no_traceback(variant: str | None, garbage: Any) -> None:
    config = good(variant)
    gym = read_gym(config, [])
    for path in places(config):
        wrong = changed(config, {path: garbage})
        found = check(wrong, read_gym(wrong, []) if path.startswith("env") else gym, KNOWN)
        assert all(finding.field and finding.what and finding.fix for finding in found)
