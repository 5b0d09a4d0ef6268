# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What engines answer, checked once where it enters.

More than one choice, missing ids or log-probs, an end that was none: each is an error that says so, never a wrong
trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym_prorl.policy.engines.engine import BackendErred, BackendFailed, Misconfigured, RequestRefused
from nemo_gym_prorl.policy.generation import Finish


_ECHO = b'"prompt_token_ids":'


class ContextFull(Exception):
    """The prompt leaves no room in the engine's context."""


def only_choice(answer: Mapping[str, Any], url: str) -> dict[str, Any]:
    """The one choice of an OpenAI-style answer."""
    choices = required(answer, "choices", url)
    if not choices:
        raise LookupError("no choice")
    if len(choices) != 1:
        raise RequestRefused(
            f"{url} returned {len(choices)} choices: ask for n rollouts, not for n choices of one",
            field="n",
        )
    return dict(choices[0])


def without_echo(content: bytes, echo: Sequence[bytes]) -> bytes:
    """An answer's content without the prompt's ids, if it repeats exactly those that were sent: comparing bytes costs
    nothing, reading 64k numbers does. Any others stay, to be looked at.

    Args:
        content: JSON.
        echo: the list of ids as JSON, in parts; where they stood is ``null`` then.
    """
    # No string can hold the name with bare quotes, so this is a field.
    field = content.find(_ECHO)
    if field < 0 or not echo:
        return content
    at = start = field + len(_ECHO)
    for part in echo:
        if not content.startswith(part, at):
            return content
        at += len(part)
    return b"%bnull%b" % (content[:start], content[at:])


def required(answer: Mapping[str, Any], name: str, url: str) -> Any:
    """What no exact trajectory can do without."""
    value = answer.get(name)
    if value is None:
        raise Misconfigured(
            f"{url} answered without {name!r}, which an exact trajectory needs: is it the engine that was configured?",
            field="policy_base_url",
        )
    return value


def finish(reason: str | None, url: str) -> Finish:
    """Why sampling ended.

    Raises:
        BackendFailed: it did not end by itself.
    """
    if reason in (None, "abort"):
        raise BackendFailed(f"{url} dropped the request before it was done")
    if reason == "error":
        raise BackendErred(f"{url} met an error before it was done")
    if not isinstance(reason, str):
        raise TypeError(f"finish reason {reason!r:.100}")
    return Finish.LENGTH if reason == "length" else Finish.STOP


def cached_tokens(answer: Mapping[str, Any]) -> int | None:
    """How many tokens of the prompt the engine had already, if it tells."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return None if cached is None else max(0, int(cached))
