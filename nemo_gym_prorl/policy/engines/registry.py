# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which wire protocols there are."""

from __future__ import annotations

from nemo_gym_prorl.policy.engines.nemo_rl import NemoRl
from nemo_gym_prorl.policy.engines.sglang import SglangGenerate
from nemo_gym_prorl.policy.engines.vllm_chat import VllmChat
from nemo_gym_prorl.policy.engines.vllm_completions import VllmCompletions


ENGINES: dict[str, type[VllmCompletions] | type[VllmChat] | type[NemoRl] | type[SglangGenerate]] = {
    engine.name: engine for engine in (VllmCompletions, VllmChat, NemoRl, SglangGenerate)
}
"""Protocols by the name that a configuration gives them."""
