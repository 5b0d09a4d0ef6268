# SPDX-License-Identifier: Apache-2.0
"""Which wire protocol a backend speaks, where the configuration leaves it open. Nothing is guessed.

Engines publish their routes, which tell them apart. What publishes none (a router, a stand-in) is asked for one token
in the protocols in question. Where that leaves a doubt, the protocol must be configured; and a backend that does not
answer yet is no evidence at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from nemo_gym_prorl.policy.engines.addresses import root_of
from nemo_gym_prorl.policy.engines.engine import BackendErred, ChatPrompt, Misconfigured, RequestRefused
from nemo_gym_prorl.policy.engines.http_engine import HttpEngine
from nemo_gym_prorl.policy.engines.registry import ENGINES
from nemo_gym_prorl.policy.engines.sampling import Sampling


_CHAT, _COMPLETIONS, _GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
_NEEDS = {"vllm": _COMPLETIONS, "vllm_chat": _CHAT, "nemo_rl": _CHAT, "sglang": _GENERATE}
_PROBE_S = 30.0


async def published(session: aiohttp.ClientSession, url: str) -> set[str] | None:
    """The routes of a server; ``None`` if it publishes none.

    Raises:
        OSError, TimeoutError, aiohttp.ClientError: nothing answers there.
    """
    async with (
        asyncio.timeout(5),
        session.get(f"{root_of(url)}/openapi.json", allow_redirects=False) as response,
    ):
        if response.status in (502, 503, 504):
            raise ConnectionError(f"{url} answered {response.status}")
        try:
            return set((await response.json(content_type=None))["paths"])
        except (KeyError, TypeError, ValueError):
            return None


def speaks(routes: set[str], protocol: str) -> bool:
    """Whether a server with these routes can be asked in a protocol."""
    return _NEEDS[protocol] in routes and (protocol != "nemo_rl" or _COMPLETIONS not in routes)


async def detect(
    session: aiohttp.ClientSession, url: str, engine: Callable[[str], HttpEngine], *, tokenizer: bool
) -> str:
    """The name of the protocol to use with a backend.

    Args:
        session: the connection pool.
        url: the backend.
        engine: makes an engine of a protocol's name.
        tokenizer: whether we could render prompts ourselves.

    Raises:
        OSError, TimeoutError, aiohttp.ClientError, BackendFailed: nothing answers there yet.
        Misconfigured: it cannot be told.
    """
    routes = await published(session, url)
    if routes is None:
        return await _asked(session, url, engine, tokenizer=tokenizer)
    if speaks(routes, "nemo_rl"):
        return "nemo_rl"
    if _GENERATE in routes:
        return "sglang"
    wanted = "vllm" if tokenizer else "vllm_chat"
    if not speaks(routes, wanted):
        raise _doubt(url, f"publishes no {_NEEDS[wanted]}")
    return wanted


async def _asked(
    session: aiohttp.ClientSession, url: str, engine: Callable[[str], HttpEngine], *, tokenizer: bool
) -> str:
    """Ask for a token in each protocol that tells whether it was understood."""
    heard = []
    for protocol in ("vllm", "sglang") if tokenizer else ("vllm_chat",):
        sampling = Sampling(max_tokens=1, temperature=1.0, top_p=1.0)
        try:
            async with asyncio.timeout(_PROBE_S):
                hello = ChatPrompt([{"role": "user", "content": "hi"}])
                await engine(protocol).generate(url, (0,), hello, sampling)
        except (Misconfigured, RequestRefused, BackendErred) as error:
            heard.append(f"{protocol}: {error.reason}")
            continue
        # Chat alone does not tell vLLM from NeMo RL's engine, whose prompts must be told where to start.
        if protocol != "vllm_chat" or await _has(session, url, _COMPLETIONS):
            return protocol
        heard.append(f"{protocol}: it has chat completions and no others, as NeMo RL's engine and its router have")
    raise _doubt(url, f"publishes no list of its routes, as routers do ({'; '.join(heard)})")


async def _has(session: aiohttp.ClientSession, url: str, path: str) -> bool:
    async with (
        asyncio.timeout(5),
        session.post(f"{root_of(url)}{path}", json={}, allow_redirects=False) as response,
    ):
        return response.status not in (404, 405, 501)


def _doubt(url: str, why: str) -> Misconfigured:
    return Misconfigured(f"{url} {why}: say which of {', '.join(ENGINES)} it is", field="policy.engine")
