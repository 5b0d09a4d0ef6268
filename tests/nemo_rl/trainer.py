# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's side: its real actor with real Gym servers below it, called as its rollout code calls it."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.environments.nemo_gym import spinup_nemo_gym_actor
from nemo_rl.experience.failures import FailureClass, classify_rollout_failure
from nemo_rl.experience.interfaces import PromptGroupRecord
from nemo_rl.experience.rollout_manager import AsyncNemoGymRolloutImpl, RolloutRetryPolicy, RolloutStats
from nemo_rl.experience.rollouts import NemoGymRolloutResult, _prepare_nemo_gym_rows, run_nemo_gym_rollout_sync
from nemo_rl.models.generation.interfaces import GenerationSamplingParams

from nemo_gym_prorl.servers.gym_client import send_keys
from tests.nemo_rl.engine import MAX_MODEL_LEN, MODEL, ByteTokenizer


HERE = Path(__file__).parent
GENERATION = {
    "max_new_tokens": 4096,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "stop_strings": None,
    "stop_token_ids": None,
    "vllm_cfg": {"max_model_len": MAX_MODEL_LEN},
}
ADD_TOOL = {
    "type": "function",
    "name": "add",
    "description": "Add a number to the sum.",
    "parameters": {
        "type": "object",
        "properties": {"number": {"type": "integer"}},
        "required": ["number"],
        "additionalProperties": False,
    },
    "strict": True,
}


@dataclass(slots=True)
class Stream:
    """Results of one call of the actor.

    Attributes:
        results: results by row index.
        error: error that ended the stream; ``None`` at a regular end.
    """

    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def verdict(self) -> FailureClass | None:
        """NeMo RL's classification of the error."""
        return None if self.error is None else classify_rollout_failure(self.error)


class _Generation:
    """The part of NeMo RL's generation interface that Gym's rollouts look at."""

    cfg = GENERATION


class Trainer:
    """One actor with its servers.

    Args:
        base_urls: the engines.
        folder: an empty working directory, which is also the driver's.
        config: the block ``env.nemo_gym``.
        model: what the engines call it.
        tokenizer: NeMo RL's.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        folder: Path,
        config: dict[str, Any],
        model: str = MODEL,
        tokenizer: Any = None,
    ) -> None:
        shutil.copytree(HERE / "counting", folder / "resources_servers" / "counting", dirs_exist_ok=True)
        (folder / "resources_servers" / "counting" / "requirements.txt").touch()
        environment = Path(config["uv_venv_dir"], "resources_servers", "counting", ".venv")
        environment.parent.mkdir(parents=True)
        environment.symlink_to(sys.prefix)
        # By default NeMo RL has its actor's environment built by uv.
        ACTOR_ENVIRONMENT_REGISTRY["nemo_rl.environments.nemo_gym.NemoGym"] = sys.executable
        self.actor = spinup_nemo_gym_actor(
            {"nemo_gym": config},
            list(base_urls),
            model,
            tokenizer=tokenizer or ByteTokenizer(),
            enable_router_replay=False,
            routed_experts_dtype="int16",
            use_fastokens=False,
        )
        ray.get(self.actor.__ray_call__.remote(send_keys))
        host, port = ray.get(self.actor.__ray_call__.remote(lambda actor: (actor.node_ip, actor.head_server_port)))
        self.head_url = f"http://{host}:{port}"

    def server_urls(self) -> dict[str, str]:
        """Instance name → base URL, as the actor's head server tells it."""
        with urlopen(f"{self.head_url}/server_instances") as response:
            return {server["process_name"]: server["url"] for server in json.load(response)}

    def run(self, *rows: dict[str, Any]) -> Stream:
        """Have the actor run rows, and read the stream of results to its end."""
        given, got = [*rows], Stream()
        _prepare_nemo_gym_rows(given, GENERATION, GenerationSamplingParams.from_generation_config(GENERATION))  # type: ignore[arg-type]
        try:
            for reference in self.actor.run_rollouts.options(num_returns="streaming").remote(given, "timing"):
                index, result, _ = ray.get(reference)
                got.results[index] = result
        except Exception as error:  # NeMo RL classifies any error
            got.error = error
        return got

    def batch(self, *rows: dict[str, Any]) -> NemoGymRolloutResult:
        """Rows to a training batch, by NeMo RL's own rollout code."""
        return run_nemo_gym_rollout_sync(
            policy_generation=_Generation(),  # type: ignore[arg-type]
            input_batch=BatchedDataDict(
                {"extra_env_info": list(rows), "loss_multiplier": torch.ones(len(rows)), "idx": list(range(len(rows)))}
            ),
            tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
            task_to_env={"nemo_gym": self.actor},
            generation_config=GENERATION,  # type: ignore[arg-type]
            log_full_result_tables=False,
        )

    async def group(self, row: dict[str, Any], generations: int) -> tuple[PromptGroupRecord, int]:
        """Run a group as NeMo RL's SingleController does; return it and the number of rows dispatched again."""
        stats = RolloutStats()
        rollouts = AsyncNemoGymRolloutImpl(
            tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
            task_to_env={"nemo_gym": self.actor},
            num_generations_per_prompt=generations,
            max_seq_len=MAX_MODEL_LEN,
            max_rollout_turns=1,
            generation_config=GENERATION,  # type: ignore[arg-type]
            retry_policy=RolloutRetryPolicy.single_attempt(max_gym_row_attempts=3),
            stats=stats,
        )
        record = await rollouts.run_rollout({"idx": 0, "message_log": [], "extra_env_info": row})  # type: ignore[typeddict-item]
        return record, stats.gym_row_redispatches


def turn(content: str | None = None, *numbers: int, latency_s: float = 0.0) -> dict[str, Any]:
    """A scripted turn that adds numbers."""
    calls = [{"name": "add", "arguments": {"number": number}} for number in numbers]
    return {"content": content, "tool_calls": calls, "latency_s": latency_s}


def counting_row(*turns: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """A row for the counting environment, as a line of a data set."""
    return {
        "agent_ref": {"type": "responses_api_agents", "name": "counting_agent"},
        "responses_create_params": {
            "input": [{"role": "user", "content": "Count to ten."}],
            "tools": [ADD_TOOL],
            "parallel_tool_calls": True,
            "metadata": {"script": json.dumps({"turns": list(turns)})},
        },
        **extra,
    }


def solving_row() -> dict[str, Any]:
    """A row that ends with reward 1 after three turns."""
    return counting_row(
        turn("<think>Seven is\nless than ten.</think>First seven.", 7),
        turn(None, 1, 2),
        turn("That makes ten."),
    )
