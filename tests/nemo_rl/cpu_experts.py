# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Has vLLM tell on a CPU, too, which experts a mixture's tokens go to: its kernel routes by itself there, past where
that is noted on a GPU, and 0 would be told for each. To be named to vLLM as ``worker_extension_cls``, so that it
is imported where the model runs."""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import cpu_fused_moe


_chosen: list[torch.Tensor] = []
_select = cpu_fused_moe.select_experts


def _noting(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weights, experts = _select(**given)
    _chosen.append(experts)
    return weights, experts


def _telling(kernel: Any) -> Any:
    def call(self: Any, layer: torch.nn.Module, *arguments: Any) -> torch.Tensor:
        result: torch.Tensor = kernel(self, layer, *arguments)
        experts = _chosen.pop()
        for runner in get_forward_context().no_compile_layers.values():
            if layer in (runner, getattr(runner, "routed_experts", None)) and runner.router.capture_fn is not None:
                runner.router.capture_fn(experts)
        return result

    return call


cpu_fused_moe.select_experts = _noting
for _kernel in (cpu_fused_moe.CPUFusedMOE, cpu_fused_moe.SGLFusedMOE):
    _kernel.__call__ = _telling(_kernel.__call__)


class Tells:
    """Nothing of its own: vLLM only wants a name to import."""
