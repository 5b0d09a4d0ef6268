# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``ng_trajectory`` of rows of every kind, read by Gym's own exporter and health checks where the Gym has them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.rollout.turn_records import TRAJECTORY, gym_reads_trajectories, ng_trajectory
from tests.cli.test_show import call, observation, said, step


needs_gym_07 = pytest.mark.skipif(not gym_reads_trajectories(), reason="from Gym 0.7 on")

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
ARGUMENTS = TEXT | st.sampled_from(["{}", '{"a": 1.10, "a": NaN}', "[1]", '{"x": 3.14159265358979323846}', "[" * 300])
THOUGHT = TEXT.map(lambda text: {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": text}]})
CALL = st.builds(call, TEXT, ARGUMENTS, st.sampled_from(["", "c1", "c2"]))
ITEM = THOUGHT | CALL | TEXT.map(said) | st.builds(observation, TEXT, st.sampled_from(["c1", "c2"]))
ODD = st.sampled_from([{"type": "web_search_call"}, {"type": 7}, {"type": "message", "role": "assistant"}, {}])
GIVEN = TEXT | st.lists(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "developer", "x"]), TEXT)
    | ITEM
    | ODD,
    max_size=3,
)


def row(output: Any, given: Any = "Go", **more: Any) -> dict[str, Any]:
    made = {
        "_ng_task_index": 3,
        "_ng_rollout_index": 0,
        "agent_ref": {"type": "responses_api_agents", "name": "prorl_agent"},
        "responses_create_params": {"input": given},
        "response": {"model": "policy", "created_at": 1, "output": output},
        **more,
    }
    made[TRAJECTORY] = ng_trajectory(made)
    return made


def answers(record: dict[str, Any]) -> list[str]:
    return [item["content"][0]["text"] for turn in record["turns"] for item in turn["answer"] if "content" in item]


@given(st.lists(ITEM | ODD, max_size=8), GIVEN, st.sampled_from([None, "agent_timeout"]), st.lists(st.integers(0, 2)))
def test_every_record_is_closed_and_each_turn_has_what_was_before_it(
    output: list[dict[str, Any]], given_: Any, failure: str | None, sizes: list[int]
) -> None:
    written = sum(item.get("type") != "function_call_output" for item in output)
    about = {"rollout": {"steps": [step(size) for size in [*sizes, max(written - sum(sizes), 0)]]}}
    made = row(output, given_, **({"failure_kind": failure} if failure else {}), **about)
    record = made[TRAJECTORY]
    [invocation] = record["invocations"]
    said_before = invocation["conversation"]
    tools = 0
    for number, turn in enumerate(record["turns"], 1):
        assert turn["turn_no"] == number
        assert turn["question"] == said_before[: len(turn["question"])]
        behind = said_before[len(turn["question"]) :]
        wrote = [*(turn["reasoning_content"] or []), *turn["answer"]]
        assert behind[: len(wrote)] == wrote
        tools += sum(item["type"] == "function_call" for item in turn["answer"])
        assert turn["step_count"] == tools
    assert len(record["turns"]) == len(record["model_calls"]) == len(invocation["model_calls"]) > 0
    assert all(isinstance(json.loads(item["arguments"]), dict) for item in said_before if "arguments" in item)
    calls = [item["call_id"] for item in said_before if item["type"] == "function_call"]
    outputs = [item["call_id"] for item in said_before if item["type"] == "function_call_output"]
    assert calls == outputs == [tool["tool_call_id"] for tool in record["tool_calls"]]
    assert len({*calls}) == len(calls)
    if failure:
        assert answers(record)[-1].startswith("(written by the service")
    if gym_reads_trajectories():
        from nemo_gym.atif_export import gym_rollout_to_atif

        assert gym_rollout_to_atif(json.loads(json.dumps(made)), session_id="s", agent_version="1").steps


def test_a_turn_has_its_times_and_tokens_and_what_was_said_beside_a_call() -> None:
    thought = {"type": "reasoning", "summary": [{"text": "hm"}]}
    output = [thought, said("I look."), call("bash", '{"a":'), observation("bad"), said("Done")]
    made = row(output, rollout={"steps": [step(3, "c1"), step(1, started_at=20.0)], "finish_reason": "max_steps"})
    record = made[TRAJECTORY]
    first, last = record["model_calls"]
    assert (first["started_at"], first["completed_at"], first["token_stats"]["completion_tokens"]) == (10.0, 11.0, 2)
    assert record["turns"][1]["timestamp"] == 20.0
    assert record["turns"][0]["reasoning_content"][0]["summary"][0]["text"] == "hm\n\nI look."
    [tool] = record["tool_calls"]
    assert (tool["started_at"], tool["duration_ms"], tool["output"]) == (11.0, 500.0, "bad")
    assert json.loads(record["turns"][0]["answer"][0]["arguments"]) == {"malformed": '{"a":'}
    assert last["response"]["metadata"] == {"rollout_finish_reason": "max_steps"}
    assert "response" not in first


def test_a_rollout_that_failed_says_so_in_words_that_are_not_the_policys() -> None:
    record = row([], failure_kind="provider_unavailable", failure_reason="no image")[TRAJECTORY]
    assert answers(record) == ["(written by the service, not by the policy) provider_unavailable: no image"]
    [only] = record["model_calls"]
    assert only["response_metadata"]["response_source"] == "local"
    made = row([said("a")], rollout={"failure": {"kind": "session_lost", "reason": "gone"}})
    assert answers(made[TRAJECTORY])[1].endswith("session_lost: gone")


@needs_gym_07
def test_gyms_health_checks_find_what_failed_and_nothing_else(tmp_path: Path) -> None:
    from nemo_gym.rollout_health import run_health_checks

    usage = {"input_tokens": 14, "output_tokens": 4}
    output = [call("bash", "{}"), observation("x"), said("Done")]
    good = row(output, rollout={"steps": [step(1, "c1"), step(1)], "finish_reason": "max_steps"})
    good["response"]["usage"] = usage
    bad = row([], failure_kind="session_lost") | {"_ng_task_index": 4}
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (good, bad)))
    healthy, ill = run_health_checks([file], output_dir=tmp_path, workers=1).rollouts
    assert (healthy.verdict, healthy.findings, healthy.unobserved) == ("healthy", [], [])
    assert ill.verdict == "unhealthy"
    assert [finding.check for finding in ill.findings] == ["model_call_zero_completion_tokens"]
