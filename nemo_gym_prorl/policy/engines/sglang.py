# SPDX-License-Identifier: Apache-2.0
"""SGLang, tokens in and tokens out.

It is always told how many to sample: left alone, it stops after 128.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_gym_prorl.policy.engines.addresses import root_of
from nemo_gym_prorl.policy.engines.answers import finish, required
from nemo_gym_prorl.policy.engines.engine import ChatPrompt
from nemo_gym_prorl.policy.engines.http_engine import HttpEngine, metric
from nemo_gym_prorl.policy.engines.keep_alive import Line
from nemo_gym_prorl.policy.engines.sampling import Sampling
from nemo_gym_prorl.policy.generation import Finish, Generation


class SglangGenerate(HttpEngine):
    """SGLang, tokens in and tokens out, over ``POST /generate``."""

    _load_names = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage")
    _kept_free = 1

    async def _generate(
        self, line: Line, url: str, prompt: Sequence[int], conversation: ChatPrompt, sampling: Sampling
    ) -> Generation:
        room = self.room(line, url, len(prompt), sampling.max_tokens)
        if room < 1:
            return Generation((), (), Finish.CONTEXT)
        parameters = {
            "max_new_tokens": room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop) or None,
            "sampling_seed": sampling.seed,
            "skip_special_tokens": False,
            **sampling.extra,
        }
        body = {
            "sampling_params": {name: value for name, value in parameters.items() if value is not None},
            "return_logprob": True,
        }
        answer = await self._post(line, f"{root_of(url)}/generate", body, ("input_ids", prompt))
        if answer is None:
            return Generation((), (), Finish.CONTEXT)
        about = required(answer, "meta_info", url)
        pairs = required(about, "output_token_logprobs", url)
        ids, log_probs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
        return Generation(ids, log_probs, finish(about["finish_reason"]["type"], url), about.get("cached_tokens"))

    def _capacity(self, metrics: str) -> int | None:
        tokens = metric(metrics, "sglang:max_total_num_tokens")
        return int(tokens) if tokens else None
