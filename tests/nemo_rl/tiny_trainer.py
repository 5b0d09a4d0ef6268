# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The tiny policy as NeMo RL's controller trains it: the weights that vLLM samples from, by transformers on the CPU.

Its log-probabilities and vLLM's are of the same model, so a token that is not where it was sampled shows in them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import torch
from transformers import AutoModelForCausalLM

from tests.nemo_rl.controller import Generation, Policy, Synchronizer, call


class TinyPolicy(Policy):
    """In place of the stand-in with two layers."""

    def __init__(self, data_plane: Any, folder: Path, model: Path, router_replay: bool = False) -> None:
        super().__init__(data_plane, folder, router_replay)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)

    def _log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=ids[:, :-1]).logits
        return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)

    def finish_train_step(self) -> dict[str, Any]:
        told = super().finish_train_step()
        self.model.save_pretrained(self.weights(self.folder, self.steps))
        return told

    @staticmethod
    def weights(folder: Path, version: int) -> Path:
        """Where those after so many steps are."""
        return folder / f"weights-{version}"


class ChatServers(Generation):
    """NeMo RL's chat servers, which pass a reset of the prefix cache on to vLLM."""

    def invalidate_kv_cache(self) -> bool:
        """Have each server call NeMo RL's own method; NeMo RL's controller ignores what vLLM answers."""
        for url in self.dp_openai_server_base_urls:
            call("POST", f"{url.removesuffix('/v1')}/prefix_cache_resets")
        return True


class FromDisk(Synchronizer):
    """Engines read the weights that the trainer has written; at first, those that it began with."""

    def __init__(self, engines: Sequence[str], folder: Path, model: Path) -> None:
        self.engines = engines
        self.folder = folder
        self.model = model

    def sync_weights(self, *, timer: Any = None, kv_scales: Any = None) -> None:
        latest = max(self.folder.glob("weights-*"), key=lambda path: int(path.name.split("-")[1]), default=self.model)
        for engine in self.engines:
            call("POST", f"{engine.removesuffix('/v1')}/weights?{urlencode({'folder': latest})}")
