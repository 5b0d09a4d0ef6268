# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""How the policy side is configured, and which backends it may be given."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.policy.service import Rewriting
from nemo_gym_prorl.serving.access import is_loopback


class PolicyConfig(BaseModel):
    """How to reach the policy and how to read it.

    Attributes:
        base_url: one backend or several, with or without ``/v1``, for rollouts that name no run; none, where all come
            with the runs that use them.
        api_key: bearer token for these backends, or one for each of them; empty for none.
        model: model name as the backends serve it.
        engine: wire protocol; ``null`` is vLLM's, by tokens where there is a tokenizer, else by messages. An engine
            that is of another kind is refused when it is first met.
        tokenizer: folder or Hugging Face name; ``null`` takes ``model`` if that is a folder with a tokenizer.
        chat_template: file of a Jinja template that replaces the tokenizer's own.
        tool_call_parser: how the model writes tool calls, by vLLM's name; ``null`` finds the one that reads what the
            chat template writes. Where the engine takes turns apart itself (``nemo_rl``, ``vllm_chat``), the format
            tells whether it does: a call that is left in a final answer is an error (``null``: ``hermes``).
        thoughts: whether a leading ``<think>`` block is taken as reasoning.
        replace_developer_role_with_system: also where the template has the role, or the engine renders.
        history: keep tokens as sampled when the template would rewrite them, or start a branch.
        limit: live rollouts per backend at most.
        unreachable_s: how long nothing of a run may be under way, for want of a backend that serves, before its turns
            that wait fail; in seconds. As long as anything is, they wait.
        keep_s: how long an unused rollout's tokens are remembered, in seconds.
        headers: sent to these backends with every request.
        backend_hosts: hosts, or patterns as ``10.0.*``, of backends that may be added at run time, besides loopback
            and the hosts of ``base_url``.
        control_token: bearer token that every route asks for; ``null`` for none.
    """

    model_config = ConfigDict(extra="forbid")

    base_url: list[str]
    api_key: str | list[str] = ""
    model: str
    engine: Literal["vllm", "vllm_chat", "nemo_rl", "sglang"] | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    thoughts: bool = True
    replace_developer_role_with_system: bool = False
    history: Rewriting = "keep"
    limit: Annotated[int, Field(ge=1)] = 256
    unreachable_s: Annotated[float, Field(gt=0)] = 900.0
    keep_s: Annotated[float, Field(gt=0)] = 3600.0
    headers: dict[str, str] = Field(default_factory=dict)
    backend_hosts: list[str] = Field(default_factory=list)
    control_token: str | None = None

    @property
    def tokenizer_folder(self) -> str | None:
        """Where the tokenizer is, or its name; ``None`` if there is none."""
        return self.tokenizer or (self.model if Path(self.model, "tokenizer.json").is_file() else None)

    @property
    def protocol(self) -> str:
        """Which of ``ENGINES`` the backends speak."""
        return self.engine or ("vllm" if self.tokenizer_folder is not None else "vllm_chat")

    def keys(self) -> list[str]:
        """The key of each backend in ``base_url``.

        Raises:
            CallerError: there are not as many keys as backends.
        """
        if isinstance(self.api_key, str):
            return [self.api_key] * len(self.base_url)
        if len(self.api_key) != len(self.base_url):
            raise CallerError(f"{len(self.api_key)} keys for {len(self.base_url)} backends", field="api_key")
        return self.api_key


class HostRefused(CallerError):
    """A backend is to be added on a host that nobody allowed: prompts would go there."""

    http_status = 403
    problem = "backend-host-refused"


def check_host(url: str, config: PolicyConfig) -> None:
    """Refuse a backend on a host that is neither loopback, nor in ``base_url``, nor allowed.

    Raises:
        HostRefused: it is none of these.
    """
    host = urlsplit(url).hostname or ""
    known = {urlsplit(known).hostname for known in config.base_url}
    if (
        host in known
        or is_loopback(host)
        or any(fnmatchcase(host, pattern.lower()) for pattern in config.backend_hosts)
    ):
        return
    raise HostRefused(f"{host} is not among the hosts in policy.backend_hosts", field="url")
