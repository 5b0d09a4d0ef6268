# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Hosted search engines: one JSON request for each search, in the words of Tavily or of Serper.

Both are a POST with a key and give a list of results; what differs is in a :class:`Dialect`, and another service is
another one. A refusal of the query itself (400, 422) is the policy's to read. Everything else is ours: a wrong key, a
used-up quota, a service that is down. What may pass by itself is asked again a few times within the time limit,
since a search that fails costs the whole rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from nemo_gym_prorl.failures import FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.stem.search.engine import BadQuery, Passage


MAX_ANSWER_BYTES = 4 * 2**20
"""Longest answer that is read."""

PAUSES_S = (0.5, 1.5)
"""Before each further try."""

_REFUSED = frozenset({400, 422})
_KEY = frozenset({401, 403})
_QUOTA = frozenset({402, 429, 432, 433})
"""432 and 433 are Tavily's, for the limits of a plan."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a service is spoken to.

    Attributes:
        url: where, unless the configuration says otherwise.
        headers: what shows the key.
        body: the request for a query and a number of results.
        results: where the list of results is in the answer; it may be left out where it would be empty.
        always: what no answer leaves out.
        fields: what title, source and text of a result are called there.
        most: results that it gives at most.
    """

    url: str
    headers: Callable[[str], dict[str, str]]
    body: Callable[[str, int], dict[str, Any]]
    results: str
    always: str
    fields: tuple[str, str, str]
    most: int


DIALECTS: Mapping[str, Dialect] = {
    "tavily": Dialect(
        url="https://api.tavily.com/search",
        headers=lambda key: {"Authorization": f"Bearer {key}"},
        body=lambda query, limit: {"query": query, "max_results": limit},
        results="results",
        always="results",
        fields=("title", "url", "content"),
        most=20,
    ),
    "serper": Dialect(
        url="https://google.serper.dev/search",
        headers=lambda key: {"X-API-KEY": key},
        body=lambda query, limit: {"q": query, "num": limit},
        results="organic",
        always="searchParameters",
        fields=("title", "link", "snippet"),
        most=100,
    ),
}
"""By the name that the configuration gives."""


class _Trouble(Exception):
    """An answer that the next try may not have."""

    def __init__(self, reason: str, kind: FailureKind) -> None:
        super().__init__(reason)
        self.kind = kind


class HostedSearch:
    """A :class:`.SearchEngine` over HTTP.

    Args:
        dialect: the service's.
        key: for it. Goes into the request's header and nowhere else.
        url: instead of the dialect's.
        timeout_s: seconds for a search, further tries included.
    """

    def __init__(self, dialect: Dialect, key: str, *, url: str | None = None, timeout_s: float = 20.0) -> None:
        self._dialect = dialect
        self._url = url or dialect.url
        self._headers = {"Content-Type": "application/json", **dialect.headers(key)}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def prepare(self) -> None:
        """Nothing: whether the service answers is seen when it is asked."""

    async def search(self, query: str, limit: int) -> Sequence[Passage]:
        """See :meth:`.SearchEngine.search`."""
        body = orjson.dumps(self._dialect.body(query, min(limit, self._dialect.most)))
        trouble: _Trouble | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                for pause_s in (0.0, *PAUSES_S):
                    await asyncio.sleep(pause_s)
                    try:
                        return self._passages(await self._ask(body))[:limit]
                    except _Trouble as error:
                        trouble = error
        except TimeoutError:
            trouble = trouble or _Trouble(f"no answer within {self._timeout_s:g} s", FailureKind.TRANSPORT_TIMEOUT)
        assert trouble is not None
        raise InfrastructureError(f"the search service at {self._url} failed: {trouble}", kind=trouble.kind)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, body: bytes) -> bytes:
        if self._session is None:
            # Cookies of one rollout's search are none of the next one's business.
            self._session = aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(), timeout=aiohttp.ClientTimeout(total=None)
            )
        try:
            async with self._session.post(
                self._url, data=body, headers=self._headers, allow_redirects=False
            ) as response:
                content = await _read(response)
        except aiohttp.ClientConnectorError as error:
            raise _Trouble(f"can't be reached: {error}", FailureKind.TRANSPORT_UNREACHABLE) from error
        except aiohttp.ClientError as error:
            raise _Trouble(f"{type(error).__name__}: {error}", FailureKind.TRANSPORT_PEER_DROP) from error
        if response.status in _REFUSED:
            raise BadQuery("the search engine does not take this query. Use fewer and plainer words.")
        if response.status in _KEY:
            raise InfrastructureError(f"{self._url} does not accept the key", field="search.api_key")
        if response.status in _QUOTA:
            raise _Trouble(f"HTTP {response.status}, the quota", FailureKind.PROVIDER_QUOTA_EXHAUSTED)
        if response.status != 200:
            raise _Trouble(f"HTTP {response.status}", FailureKind.PROVIDER_UNAVAILABLE)
        return content

    def _passages(self, content: bytes) -> list[Passage]:
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise _Trouble("the answer is no JSON", FailureKind.PROVIDER_UNAVAILABLE) from error
        results = answer.get(self._dialect.results, []) if isinstance(answer, dict) else None
        if not isinstance(results, list) or self._dialect.always not in answer:
            raise _Trouble("the answer is not the service's", FailureKind.PROVIDER_UNAVAILABLE)
        title, source, text = self._dialect.fields
        return [
            Passage(_text(result, text), _text(result, title), _text(result, source))
            for result in results
            if isinstance(result, dict) and _text(result, text)
        ]


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts, size = list[bytes](), 0
    async for part in response.content.iter_chunked(2**16):
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise _Trouble(f"the answer is longer than {MAX_ANSWER_BYTES} bytes", FailureKind.PROVIDER_UNAVAILABLE)
    return b"".join(parts)


def _text(result: Mapping[str, Any], name: str) -> str:
    value = result.get(name)
    return value if isinstance(value, str) else ""
