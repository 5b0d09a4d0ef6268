# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Tool ``search`` and its engines: a local index, made by ``prorl data index``, or Tavily's service.

A query that the engine refuses is the policy's mistake and becomes an observation. An engine that fails is an
infrastructure error, because an observation "no results" would teach the policy that searching is useless. The tool
runs in the server's process, since the sandbox has no network.

The index is a bm25s folder that includes the passages. The index is memory-mapped, so it may be larger than memory,
and is opened and searched off the event loop.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import aiohttp
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError, is_text
from nemo_gym_prorl.tasks.workbench.observations import (
    Arguments,
    BadArguments,
    parse_arguments,
    tool_schema,
)


MAX_QUERY_CHARS = 400
MAX_PAGE = 4
"""Maximum characters of a query, and pages: Tavily allows 400 characters and 20 results (four pages of five)."""

NO_RESULTS = "No results. Try other words."
NO_MORE_RESULTS = "No more results."


class BadQuery(Exception):
    """The engine refuses a query; the message is shown to the policy."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Searchable piece of text.

    Attributes:
        text: content, which is searched with the title.
        title: may be empty.
        source: URL or name of the source; may be empty.
    """

    text: str
    title: str = ""
    source: str = ""


class SearchArguments(Arguments):
    """Search a library of texts. The answer is a page of passages, best first. A few telling words find more than a \
whole question."""

    query: str = Field(min_length=1, max_length=MAX_QUERY_CHARS, description="What to look for.")
    page: int | None = Field(default=None, ge=1, le=MAX_PAGE, description="Which page of the results; default 1.")

    def lacks(self) -> str | None:
        return None if self.query.strip() else "search needs a query"


SCHEMA = tool_schema("search", SearchArguments)
"""Function schema of the tool for the Responses API."""


class SearchSettings(BaseModel):
    """Settings under ``search:``, as described in ``resources_servers/prorl_stem/configs/prorl_stem.yaml``."""

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
            raise ValueError("search.api_key: must be set for engine: tavily")
        return self


class SearchTool:
    """:class:`.FurtherTool` that searches with an engine."""

    schema: Mapping[str, Any] = SCHEMA

    def __init__(self, engine: SearchEngine, limits: SearchSettings) -> None:
        self._engine = engine
        self._limits = limits

    async def prepare(self) -> None:
        await self._engine.prepare()

    async def call(self, arguments: object) -> str:
        """Return a page of results; an error text if the arguments are invalid or the engine refuses the query."""
        try:
            asked = parse_arguments("search", SearchArguments, arguments)
        except BadArguments as error:
            return str(error)
        before = ((asked.page or 1) - 1) * self._limits.results
        try:
            found = await self._engine.search(asked.query.strip(), before + self._limits.results)
        except BadQuery as error:
            return f"Error: {error}"
        return render(found[before : before + self._limits.results], before, self._limits)


def render(passages: Sequence[Passage], before: int, limits: SearchSettings) -> str:
    """Return a page of results as an observation, numbered after the ``before`` results of earlier pages."""
    if not passages:
        return NO_MORE_RESULTS if before else NO_RESULTS
    parts = []
    for number, passage in enumerate(passages, before + 1):
        head = " - ".join(_line(part) for part in (passage.title, passage.source) if part.strip())
        parts.append(f"[{number}] {head}".rstrip() + f"\n{_cut(passage.text.strip(), limits.passage_chars)}")
    return "\n\n".join(parts)


def _line(text: str) -> str:
    return _cut(" ".join(text.split()), 200)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit].rstrip()} [...]"


def engine_of(settings: SearchSettings, sample: Path) -> SearchEngine:
    """Return the configured engine. ``offline`` without an index searches ``sample``, passages as JSON lines."""
    if settings.api_key is not None and settings.engine == "tavily":
        return TavilySearch(settings.api_key, url=settings.url, timeout_s=settings.timeout_s)
    if settings.index is None:
        return OfflineSearch(lambda: _index_of(sample))
    folder = Path(settings.index).expanduser()
    return OfflineSearch(lambda: Index(folder))


def _index_of(sample: Path) -> Index:
    with tempfile.TemporaryDirectory(prefix="prorl-index-") as folder:
        build((Passage(**orjson.loads(line)) for line in sample.open("rb")), Path(folder) / "index")
        return Index(Path(folder) / "index")  # mapped files stay readable after their removal


MAX_PASSAGE_CHARS = 4000
"""Maximum characters of a passage; longer texts are split, so that results show the matching text."""

_SCORES = "params.index.json"
"""File in every index folder of bm25s."""

_WORDS = r"(?u)\b\w+\b"
"""Pattern of words, including single letters and digits, which are symbols in science."""


def build(passages: Iterable[Passage], folder: Path) -> int:
    """Build an index. The folder appears atomically by a rename; an older index is removed just before.

    Args:
        passages: passages in any order; passages without text are skipped.
        folder: new or empty folder, or folder of an older index.

    Returns:
        Number of indexed passages.

    Raises:
        CallerError: no passage has text, the folder contains other files, or the folder cannot be written.
    """
    import bm25s

    if folder.exists() and not (folder / _SCORES).is_file() and any(folder.iterdir()):
        raise CallerError("exists and is no index; name a new or empty folder", field=str(folder))
    pieces = [piece for passage in passages for piece in _pieces(passage)]
    if not pieces:
        raise CallerError("has no passage with text", field="corpus")
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
    """Searchable index, opened from a folder of :func:`build`.

    Raises:
        InfrastructureError: the index is missing or damaged; the error names ``search.index``.
    """

    def __init__(self, folder: Path) -> None:
        import bm25s

        try:
            self._index = bm25s.BM25.load(folder, load_corpus=True, mmap=True, show_progress=False)
            self._size = int(self._index.scores["num_docs"])
            if len(self._index.corpus) != self._size:
                raise ValueError("passages are missing")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InfrastructureError(
                f"cannot open the index {folder}: {error}; make one with `prorl data index`", field="search.index"
            ) from error

    def search(self, query: str, limit: int) -> Sequence[Passage]:
        """Return at most ``limit`` passages, best first; passages without a word of the query are left out."""
        found, scores = self._index.retrieve(_tokens([query]), k=min(limit, self._size), show_progress=False)
        return [Passage(**passage) for passage, score in zip(found[0], scores[0], strict=True) if score > 0]

    def close(self) -> None:
        self._index.corpus.close()


def _tokens(texts: Sequence[str]) -> list[list[str]]:
    import bm25s
    import Stemmer

    words: list[list[str]] = bm25s.tokenize(
        list(texts),
        token_pattern=_WORDS,
        stopwords="english",
        # One stemmer for each call, since stemmers are not thread-safe.
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
    """Engine that searches an :class:`.Index`.

    Args:
        open_index: blocking function that opens the index. :meth:`prepare` raises the function's errors, and repeats a
            failed call the next time, so an index may be added later.
    """

    def __init__(self, open_index: Callable[[], Index]) -> None:
        self._open_index = open_index
        self._index: Index | None = None
        self._opening = asyncio.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="search")  # one: bm25s readers share a file offset

    async def prepare(self) -> None:
        async with self._opening:
            if self._index is None:
                self._index = await self._off_the_loop(self._open_index)

    async def search(self, query: str, limit: int) -> Sequence[Passage]:
        """Return at most ``limit`` passages, best first; empty if no passage matches.

        Raises:
            InfrastructureError: the index cannot be read.
        """
        await self.prepare()
        index = self._index
        assert index is not None
        try:
            return await self._off_the_loop(lambda: index.search(query, limit))
        except (OSError, ValueError, IndexError) as error:
            reason = f"cannot read the index: {type(error).__name__}: {error}"
            raise InfrastructureError(reason, kind=FailureKind.PROVIDER_UNAVAILABLE, field="search.index") from error

    async def aclose(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        if self._index is not None:
            self._index.close()

    async def _off_the_loop[T](self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


TAVILY_URL = "https://api.tavily.com/search"

MAX_RESULTS = 20
"""Tavily's maximum number of results of a query."""

PAUSES_S = (0.5, 1.5)
"""Pauses in seconds before the second and third try."""

_REFUSED = frozenset({400, 422})
_KEY = frozenset({401, 403})
_QUOTA = frozenset({402, 429, 432, 433})
"""Statuses of an exhausted quota; Tavily sends 432 and 433 for the limits of a plan."""


class _TransientError(Exception):
    def __init__(self, reason: str, kind: FailureKind) -> None:
        super().__init__(reason)
        self.kind = kind


class _TavilyResult(BaseModel):
    content: str | None = None
    title: str | None = None
    url: str | None = None


class _TavilyResponse(BaseModel):
    results: list[_TavilyResult]


def _passages(content: bytes) -> list[Passage]:
    try:
        results = _TavilyResponse.model_validate_json(content).results
    except ValidationError as error:
        raise _TransientError("the response is not Tavily's JSON", FailureKind.PROVIDER_UNAVAILABLE) from error
    return [Passage(one.content, one.title or "", one.url or "") for one in results if one.content]


class TavilySearch:
    """Engine that searches with Tavily's service, by one JSON request per try.

    A refusal of the query (400, 422) is an observation for the policy. A wrong key, an exhausted quota and an
    unavailable service are infrastructure errors. Transient failures are retried within the time limit, because a
    failed search costs the whole rollout.

    Args:
        key: API key, sent in a header of each request.
        url: URL of a compatible service; ``None`` for Tavily's own.
        timeout_s: seconds for a search, including retries.
    """

    def __init__(self, key: str, *, url: str | None = None, timeout_s: float = 20.0) -> None:
        self._url = url or TAVILY_URL
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def prepare(self) -> None:
        """Do nothing, because only a search shows whether the service works."""

    async def search(self, query: str, limit: int) -> Sequence[Passage]:
        """Return at most ``limit`` passages, best first; empty if no passage matches.

        Raises:
            BadQuery: the service refuses the query.
            InfrastructureError: the service failed.
        """
        body = orjson.dumps({"query": query, "max_results": min(limit, MAX_RESULTS)})
        trouble: _TransientError | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                for pause_s in (0.0, *PAUSES_S):
                    await asyncio.sleep(pause_s)
                    try:
                        return _passages(await self._ask(body))[:limit]
                    except _TransientError as error:
                        trouble = error
        except TimeoutError:
            trouble = trouble or _TransientError(
                f"no answer within {self._timeout_s:g} s", FailureKind.TRANSPORT_TIMEOUT
            )
        assert trouble is not None
        raise InfrastructureError(f"the search service at {self._url} failed: {trouble}", kind=trouble.kind)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, body: bytes) -> bytes:
        if self._session is None:
            # Cookies would link the searches of different rollouts.
            self._session = aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(), timeout=aiohttp.ClientTimeout(total=None)
            )
        try:
            async with self._session.post(
                self._url, data=body, headers=self._headers, allow_redirects=False
            ) as response:
                content = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise _TransientError(f"no connection: {error}", FailureKind.TRANSPORT_UNREACHABLE) from error
        except aiohttp.ClientError as error:
            raise _TransientError(f"{type(error).__name__}: {error}", FailureKind.TRANSPORT_PEER_DROP) from error
        if response.status in _REFUSED:
            raise BadQuery("the search engine does not take this query. Use fewer and plainer words.")
        if response.status in _KEY:
            raise InfrastructureError(f"{self._url} refuses the key; correct it", field="search.api_key")
        if response.status != 200:
            used_up = response.status in _QUOTA
            kind = FailureKind.PROVIDER_QUOTA_EXHAUSTED if used_up else FailureKind.PROVIDER_UNAVAILABLE
            raise _TransientError(f"HTTP {response.status}", kind)
        return content


SearchEngine = OfflineSearch | TavilySearch
"""Engine; the server prepares the engine before each session and closes it at the end."""
