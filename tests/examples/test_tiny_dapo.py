# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What the example's trainings rest on: riddles, demonstrations that say what a sandbox says, tokens, the loss."""

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from tokenizers import Tokenizer

from examples.tiny_dapo.lessons import ASSISTANT, END, Carelessness, Demonstration, demonstrate, lesson, make_tokenizer
from examples.tiny_dapo.riddles import QUESTIONS, Riddle, RiddleServer, draw_riddles
from nemo_gym_prorl.dapo.runner import TrainedRollout, TrainingBatch
from nemo_gym_prorl.policy.text.formats import FORMATS
from nemo_gym_prorl.policy.text.renderer import Renderer
from nemo_gym_prorl.policy.text.turn_scanner import parse
from nemo_gym_prorl.rollout.gym_rows import take_tokens
from nemo_gym_prorl.servers.task_server import TaskServerConfig
from tests.prorl_code.conftest import RESPONSE, Client
from tests.rollout.serving import serve


FOLDER = Path("examples/tiny_dapo")
NEVER = Carelessness(no_look=0, takes_name_for_code=0, gives_up=0, wrong_name=0)
ALWAYS_WRONG_NAME = Carelessness(no_look=0, wrong_name=1)
HALF = Carelessness(no_look=0, takes_name_for_code=0.5, gives_up=0.5, wrong_name=0)


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    config: Any = OmegaConf.to_container(
        OmegaConf.load(FOLDER / "resources_servers/riddles/configs/riddles.yaml"), resolve=False
    )
    server = RiddleServer(
        config=TaskServerConfig(port=1, name="riddles", **config["riddles"]["resources_servers"]["riddles"]),
        server_client=ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
            global_config_dict=OmegaConf.create({"sandbox": config["sandbox"]}),
        ),
    )
    async with serve(server.setup_webserver()) as url:
        yield url


async def replay(base_url: str, riddle: Riddle, shown: Demonstration) -> dict[str, Any]:
    """Does what the demonstrator did; the sandbox says what was written down."""
    async with Client(base_url) as client:
        assert (await client.post("/seed_session", riddle.row()))[0] == 200
        for said, seen in shown.turns:
            parsed = parse(said, FORMATS["hermes"])
            if not seen:
                break
            assert not parsed.content
            [call] = parsed.calls
            assert await client.tool(call.name, **json.loads(call.arguments)) == seen
        assert await client.post("/release_session") == (200, {"released": True}, None)
        message = {"type": "message", "role": "assistant", "id": "m", "status": "completed"}
        text = {"type": "output_text", "text": said, "annotations": []}
        response = RESPONSE | {"output": [message | {"content": [text]}]}
        status, verdict, _ = await client.post("/verify", riddle.row() | {"response": response})
        assert status == 200, verdict
    return verdict


@pytest.mark.sandbox
async def test_a_sandbox_says_what_the_demonstrations_say(base_url: str) -> None:
    riddles = {riddle.kind: riddle for riddle in draw_riddles(50, "test")}
    assert set(riddles) == set(QUESTIONS)
    for riddle in riddles.values():
        right = demonstrate(riddle, random.Random(1), NEVER)
        verdict = await replay(base_url, riddle, right)
        assert (verdict["reward"], verdict["verdict"]) == (1.0, "right")
        lost = demonstrate(riddle, random.Random(1), ALWAYS_WRONG_NAME)
        verdict = await replay(base_url, riddle, lost)
        assert (verdict["reward"], verdict["verdict"]) == (0.0, "wrong")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Path]:
    folder = tmp_path_factory.mktemp("tokenizer")
    return make_tokenizer(folder), folder


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60)
def test_a_lesson_is_the_conversation_as_the_template_writes_it(made: tuple[Tokenizer, Path], seed: int) -> None:
    rng = random.Random(seed)
    shown = demonstrate(Riddle.draw(rng), rng, NEVER)
    tokenizer, folder = made
    renderer = Renderer.load(str(folder))
    messages: list[dict[str, Any]] = [{"role": "user", "content": shown.question}]
    for number, (said, seen) in enumerate(shown.turns):
        parsed = parse(said, FORMATS["hermes"])
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            message["tool_calls"] = [
                {"id": f"c{number}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in parsed.calls
            ]
        messages.append(message)
        if seen:
            messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": seen})
    ids, mask = lesson(shown, tokenizer)
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
    text = renderer.template.render(messages, tools, prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == shown.text() == text
    wrote = [token for token, is_policys in zip(ids, mask, strict=True) if is_policys]
    assert tokenizer.decode(wrote, skip_special_tokens=False) == "".join(said + END for said, _ in shown.turns)
    assert ids.count(tokenizer.token_to_id(ASSISTANT)) == len(shown.turns)


def test_a_rollout_is_learnt_from_as_it_was_sampled() -> None:
    pytest.importorskip("torch", reason="the extra 'tiny' is not installed")
    from examples.tiny_dapo.policy import sample_of

    def item(prompt: list[int], sampled: list[int], log_probs: list[float]) -> dict[str, Any]:
        return {
            "prompt_token_ids": prompt,
            "generation_token_ids": sampled,
            "generation_log_probs": log_probs,
        }

    turns = [item([1, 2], [3, 4], [-0.1, -0.2]), {"type": "function_call_output"}, item([1, 2, 3, 4, 5], [6], [-0.3])]
    sample = sample_of(take_tokens(copy.deepcopy({"output": turns})), 0.5)
    assert sample.ids == [1, 2, 3, 4, 5, 6]
    assert sample.mask == [False, False, True, True, False, True]
    assert sample.log_probs == [-0.1, -0.2, -0.3]
    turns[2]["prompt_token_ids"] = [1, 2, 9, 4, 5]
    with pytest.raises(ValueError, match="do not continue"):
        sample_of(take_tokens({"output": turns}), 0.5)


def test_a_masked_rollout_is_in_neither_baseline_nor_loss() -> None:
    pytest.importorskip("torch", reason="the extra 'tiny' is not installed")
    from examples.tiny_dapo.policy import samples_of

    [tokens] = take_tokens(
        {"output": [{"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.1]}]}
    )
    ends = [(1.0, False), (0.0, False), (0.0, True), (0.0, True)]
    group = [TrainedRollout(str(n), {}, reward, 0, masked, [tokens]) for n, (reward, masked) in enumerate(ends)]
    advantages = sorted(sample.advantage for sample in samples_of(TrainingBatch(0, 0, [group]), random.Random(0)))
    assert advantages == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-4)


def test_the_loss_prefers_what_had_the_advantage_and_stops_at_the_clip() -> None:
    torch = pytest.importorskip("torch", reason="the extra 'tiny' is not installed")
    from examples.tiny_dapo.policy import Sample, TinyModel, learn, log_probs_of

    torch.manual_seed(0)
    model = TinyModel(20, width=32, heads=2, layers=1)
    good, bad = [1, 2, 3, 4], [1, 2, 5, 6]
    mask = [False, False, True, True]

    def log_probs(ids: list[int]) -> list[float]:
        with torch.no_grad():
            values: list[float] = log_probs_of(model, torch.tensor([ids]))[0, 1:].tolist()
        return values

    before = [log_probs(good), log_probs(bad)]
    samples = [Sample(good, mask, before[0], 1.0), Sample(bad, mask, before[1], -1.0)]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    learn(model, optimiser, samples)
    assert sum(log_probs(good)) > sum(before[0])
    assert sum(log_probs(bad)) < sum(before[1])
    far = [value - 1 for value in log_probs(good)]
    weights = [parameter.clone() for parameter in model.parameters()]
    learn(model, optimiser, [Sample(good, mask, far, 1.0)])
    assert all(torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True)), "no gradient is left"


@pytest.mark.gym
@pytest.mark.sandbox
@pytest.mark.long("a training of four batches, from the warm start to the end")
def test_a_short_training(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the extra 'tiny' is not installed")
    words = ["--seeds", "1", "--steps", "4", "--out", str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-m", "examples.tiny_dapo", *words], check=True, env=environment, timeout=1200)
    log = json.loads((tmp_path / "seed0-steps4.json").read_text())
    assert [step["step"] for step in log["steps"]] == [1, 2, 3, 4]
    assert all(0 < step["reward"] < 1 for step in log["steps"]), "groups with variance"
    assert 0.1 < log["before"] < 0.9
