# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Persistent connections to engines, and validation of their answers.

Engines close connections that were idle for some seconds (vLLM: 5), possibly just as a request reuses a connection.
Such a close says nothing about the engine's health. The client repeats a request whose connection ended before an
answer. Cancelling a request closes its connection, on which engines abort the request.

Several choices, missing ids or log-probs, and an aborted generation each raise an error, so they never become a wrong
trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym_prorl.http.client import ConnectionDropped, HttpClient
from nemo_gym_prorl.http.tracing import trace_headers
from nemo_gym_prorl.policy.engines.engine import BackendErred, BackendFailed, Misconfigured, RequestRefused
from nemo_gym_prorl.policy.generation import Finish
from nemo_gym_prorl.policy.tokens.prompt import PROMPT_IDS


_TRIES = 3
"""Attempts at a request whose connection ends before an answer; each reused connection may have been idle too long."""
CONNECT_S = 5.0
"""Time limit for opening a connection, and for a control request, in seconds; sampling has no limit."""
_JSON = {"Content-Type": "application/json"}


async def post(client: HttpClient, url: str, headers: Mapping[str, str], body: Sequence[bytes]) -> tuple[int, bytes]:
    """Send a POST request and return status and content of the answer. Redirects are not followed.

    Args:
        client: connections to engines.
        url: the address.
        headers: headers besides those of the body.
        body: JSON, in parts.

    Raises:
        ConnectFailed: no connection could be opened in time.
        ConnectionDropped: the connection ended within the answer, or before the answer at every attempt, or the answer
            is not HTTP.
        ValueError: a header is invalid.
    """
    for left in reversed(range(_TRIES)):
        try:
            answer = await client.request("POST", url, {**headers, **_JSON, **trace_headers()}, body)
        except ConnectionDropped as dropped:
            if dropped.begun or not left:
                raise
        else:
            return answer.status, answer.body
    raise AssertionError


class ContextFull(Exception):
    """The prompt leaves no room in the engine's context."""


def single_choice(answer: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return the only choice of an OpenAI-style answer.

    Raises:
        RequestRefused: there are several choices.
        LookupError: there is no choice.
    """
    choices = required(answer, "choices", url)
    if not choices:
        raise LookupError("no choice")
    if len(choices) != 1:
        raise RequestRefused(
            f"{url} returned {len(choices)} choices: run n rollouts in place of n choices",
            field="n",
        )
    return dict(choices[0])


def strip_prompt_echo(content: bytes, echo: Sequence[bytes]) -> bytes:
    """Replace the prompt's ids in an answer by ``null`` if they equal the sent ids byte for byte.

    The comparison of bytes avoids parsing up to 64k numbers. Other ids stay in the answer and are checked after
    parsing.

    Args:
        content: JSON.
        echo: the sent list of ids as JSON, in parts.
    """
    field = content.find(PROMPT_IDS)
    if field < 0 or not echo:
        return content
    at = start = field + len(PROMPT_IDS)
    for part in echo:
        if not content.startswith(part, at):
            return content
        at += len(part)
    return b"%bnull%b" % (content[:start], content[at:])


def required(answer: Mapping[str, Any], name: str, url: str) -> Any:
    """Return a field that an exact trajectory requires; raise :class:`Misconfigured` without the field."""
    value = answer.get(name)
    if value is None:
        raise Misconfigured(
            f"{url} answered without {name!r}, which an exact trajectory needs: check policy.engine",
            field="policy_base_url",
        )
    return value


def finish(reason: str | None, url: str) -> Finish:
    """Convert an engine's finish reason.

    Raises:
        BackendFailed: the engine aborted the request or reported an error.
        TypeError: the reason is not a text.
    """
    if reason in (None, "abort"):
        raise BackendFailed(f"{url} aborted the request before the sample was complete")
    if reason == "error":
        raise BackendErred(f"{url} reported an error before the sample was complete")
    if not isinstance(reason, str):
        raise TypeError(f"finish reason {reason!r:.100}")
    return Finish.LENGTH if reason == "length" else Finish.STOP


def cached_tokens(answer: Mapping[str, Any]) -> int | None:
    """Return the number of prompt tokens from the engine's prefix cache; ``None`` if not reported."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return None if cached is None else max(0, int(cached))
