# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Search engines: an index on this machine, made by ``prorl data index``, or Tavily's service.

The index is bm25s's own folder, with the passages in it. It is memory-mapped, so it may be larger than memory, and is
opened and searched off the event loop.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

import aiohttp
import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, is_text
from nemo_gym_prorl.tasks.stem.search import BadQuery, PageLimits, Passage, SearchEngine


class SearchSettings(BaseModel):
    """See the comments in ``resources_servers/prorl_stem/configs/prorl_stem.yaml``."""

    model_config = ConfigDict(extra="forbid")

    engine: Literal["offline", "tavily"] = "offline"
    index: str | None = None
    api_key: str | None = Field(default=None, repr=False)
    url: str | None = None
    timeout_s: float = Field(default=20.0, gt=0)
    results: int = Field(default=5, ge=1, le=20)
    passage_chars: int = Field(default=1500, ge=100, le=20_000)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.engine == "tavily" and not self.api_key:
            raise ValueError("search.api_key: tavily takes a key")
        return self

    @property
    def page(self) -> PageLimits:
        """Bounds of a page of results."""
        return PageLimits(self.results, self.passage_chars)


def engine_of(settings: SearchSettings, sample: Path) -> SearchEngine:
    """Return the engine that is configured.

    Args:
        settings: the configuration.
        sample: passages to search where no index is named, as JSON lines.
    """
    if settings.api_key is not None and settings.engine == "tavily":
        return TavilySearch(settings.api_key, url=settings.url, timeout_s=settings.timeout_s)
    if settings.index is None:
        return OfflineSearch(lambda: _index_of(sample))
    folder = Path(settings.index).expanduser()
    return OfflineSearch(lambda: Index(folder))


def _index_of(sample: Path) -> Index:
    with tempfile.TemporaryDirectory(prefix="prorl-index-") as folder:
        build((Passage(**orjson.loads(line)) for line in sample.open("rb")), Path(folder) / "index")
        return Index(Path(folder) / "index")  # what is mapped stays, though its name goes


MAX_PASSAGE_CHARS = 4000
"""A longer text is cut into passages at line ends or spaces, so that what is found is what is read."""

_SCORES = "params.index.json"
"""A file that each of bm25s's folders has."""

_WORDS = r"(?u)\b\w+\b"
"""Single letters and digits are words: in science they are symbols."""


def build(passages: Iterable[Passage], folder: Path) -> int:
    """Make an index. The folder is there when it is complete, and replaces an index that was there.

    Args:
        passages: in any order; those without text are left out.
        folder: for the index.

    Returns:
        How many passages it holds.

    Raises:
        CallerError: there is no passage, or the folder holds something else or can't be written.
    """
    import bm25s

    if folder.exists() and not (folder / _SCORES).is_file() and any(folder.iterdir()):
        raise CallerError("is there and is no index", field=str(folder))
    pieces = [piece for passage in passages for piece in _pieces(passage)]
    if not pieces:
        raise CallerError("there is no passage in it", field="corpus")
    index = bm25s.BM25(method="lucene")
    index.index(_tokens([f"{piece.title}\n{piece.text}" for piece in pieces]), show_progress=False)
    work = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        index.save(work, corpus=[asdict(piece) for piece in pieces], show_progress=False)
        work.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
    except OSError as error:
        raise CallerError(f"cannot be written: {error.strerror or error}", field=str(folder)) from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    return len(pieces)


class Index:
    """An open index.

    Args:
        folder: where :func:`build` made it.

    Raises:
        InfrastructureError: it is not there or not whole; names ``search.index``.
    """

    def __init__(self, folder: Path) -> None:
        import bm25s

        try:
            self._index = bm25s.BM25.load(folder, load_corpus=True, mmap=True, show_progress=False)
            self._size = int(self._index.scores["num_docs"])
            if len(self._index.corpus) != self._size:
                raise ValueError("passages are missing")
            Passage(**self._index.corpus[self._size - 1])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InfrastructureError(
                f"{folder} can't be searched: {error}; make it with `prorl data index`", field="search.index"
            ) from error

    def search(self, query: str, limit: int) -> Sequence[Passage]:
        """The best passages, best first; those that share no word with the query are none."""
        found, scores = self._index.retrieve(_tokens([query]), k=min(limit, self._size), show_progress=False)
        return [Passage(**passage) for passage, score in zip(found[0], scores[0], strict=True) if score > 0]

    def close(self) -> None:
        """Let go of the files."""
        self._index.corpus.close()


def _tokens(texts: Sequence[str]) -> list[list[str]]:
    import bm25s
    import Stemmer

    words: list[list[str]] = bm25s.tokenize(
        list(texts),
        token_pattern=_WORDS,
        stopwords="english",
        # Its own for each call: a stemmer must not be used by two threads at a time.
        stemmer=Stemmer.Stemmer("english"),
        return_ids=False,
        show_progress=False,
    )
    return words


def _pieces(passage: Passage) -> Iterable[Passage]:
    if not all(is_text(part) for part in (passage.text, passage.title, passage.source)):
        return
    rest = passage.text.strip()
    while rest:
        piece, rest = _split(rest)
        if piece:
            yield Passage(piece, passage.title, passage.source)


def _split(text: str) -> tuple[str, str]:
    if len(text) <= MAX_PASSAGE_CHARS:
        return text, ""
    least = MAX_PASSAGE_CHARS // 2
    ends = (text.rfind(mark, least, MAX_PASSAGE_CHARS) for mark in ("\n", ". ", " "))
    end = next((end + 1 for end in ends if end >= 0), MAX_PASSAGE_CHARS)
    return text[:end].strip(), text[end:].strip()


class OfflineSearch:
    """A :class:`.SearchEngine` over an :class:`.Index`.

    Args:
        open_index: opens it, or makes it first; blocks. What it raises is raised by :meth:`prepare`, each time anew,
            so an index that was missing is found when it is there.
    """

    def __init__(self, open_index: Callable[[], Index]) -> None:
        self._open_index = open_index
        self._index: Index | None = None
        self._opening = asyncio.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="search")  # bm25s reads passages at a shared offset

    async def prepare(self) -> None:
        """Open the index, once."""
        async with self._opening:
            if self._index is None:
                self._index = await self._off_the_loop(self._open_index)

    async def search(self, query: str, limit: int) -> Sequence[Passage]:
        """See :meth:`.SearchEngine.search`."""
        if self._index is None:
            await self.prepare()
        index = self._index
        assert index is not None
        try:
            return await self._off_the_loop(lambda: index.search(query, limit))
        except (OSError, ValueError, IndexError) as error:
            reason = f"the index can't be read: {type(error).__name__}: {error}"
            raise InfrastructureError(reason, kind=FailureKind.PROVIDER_UNAVAILABLE, field="search.index") from error

    async def aclose(self) -> None:
        """Close the index when the searches in it have ended."""
        await asyncio.to_thread(self._threads.shutdown)
        if self._index is not None:
            self._index.close()

    async def _off_the_loop[T](self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


TAVILY_URL = "https://api.tavily.com/search"

MAX_RESULTS = 20
"""As many results Tavily gives at most."""

MAX_ANSWER_BYTES = 4 * 2**20
"""Longest answer that is read."""

PAUSES_S = (0.5, 1.5)
"""Before each further try."""

_REFUSED = frozenset({400, 422})
_KEY = frozenset({401, 403})
_QUOTA = frozenset({402, 429, 432, 433})
"""432 and 433 are Tavily's, for the limits of a plan."""


class _Trouble(Exception):
    """An answer that the next try may not have."""

    def __init__(self, reason: str, kind: FailureKind) -> None:
        super().__init__(reason)
        self.kind = kind


class TavilySearch:
    """A :class:`.SearchEngine` over HTTP: one JSON request for each search.

    A refusal of the query itself (400, 422) is the policy's to read. Everything else is ours: a wrong key, a used-up
    quota, a service that is down. What may pass by itself is asked again a few times within the time limit, since a
    search that fails costs the whole rollout.

    Args:
        key: for the service. Goes into the request's header and nowhere else.
        url: of the service, or of one that speaks as it does.
        timeout_s: seconds for a search, further tries included.
    """

    def __init__(self, key: str, *, url: str | None = None, timeout_s: float = 20.0) -> None:
        self._url = url or TAVILY_URL
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def prepare(self) -> None:
        """Nothing: whether the service answers is seen when it is asked."""

    async def search(self, query: str, limit: int) -> Sequence[Passage]:
        """See :meth:`.SearchEngine.search`."""
        body = orjson.dumps({"query": query, "max_results": min(limit, MAX_RESULTS)})
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
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise _Trouble("the answer is not the service's", FailureKind.PROVIDER_UNAVAILABLE)
        return [
            Passage(_text(result, "content"), _text(result, "title"), _text(result, "url"))
            for result in results
            if isinstance(result, dict) and _text(result, "content")
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
