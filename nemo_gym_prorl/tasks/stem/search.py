# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""``search`` as a tool, and its engines: an index on this machine, made by ``prorl data index``, or Tavily's service.

A question that the engine does not take is the policy's mistake, and an observation. An engine that can't be had is
ours: a policy that reads "no results" where there was no search learns that searching is useless. The tool runs in the
server's process: the sandbox has no network, and needs none for it.

The index is bm25s's own folder, with the passages in it. It is memory-mapped, so it may be larger than memory, and is
opened and searched off the event loop.
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
from nemo_gym_prorl.tasks.arguments import Arguments, BadArguments, parse_arguments, tool_schema
from nemo_gym_prorl.tasks.sandbox import Sandbox
from nemo_gym_prorl.tasks.task import SandboxNeeds
from nemo_gym_prorl.tasks.workbench.tools import ToolCallStats


MAX_QUERY_CHARS = 400
MAX_PAGE = 4
"""Beyond these no engine that we know of gives more: a hosted one has 20 results to a query, or 400 characters."""

NOTHING = "No results. Try other words."
NO_MORE = "No more results."


class BadQuery(Exception):
    """The engine does not take this query; the message is for the policy."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text that can be found.

    Attributes:
        text: what it says.
        title: what it is called; may be empty.
        source: where it is from: an address, a name; may be empty.
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
        """Words."""
        return None if self.query.strip() else "search needs a query"


SCHEMA = tool_schema("search", SearchArguments)
"""The tool as the Responses API describes functions."""


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


class OpenSearch:
    """The tool of one session."""

    over = False

    def __init__(self, engine: SearchEngine, limits: SearchSettings) -> None:
        self._engine = engine
        self._limits = limits
        self._call_stats = ToolCallStats()

    async def call(self, tool: str, arguments: object) -> str:
        """A page of results, or what is wrong with the call.

        Raises:
            InfrastructureError: the engine can't be had.
        """
        observation = await self._call(tool, arguments)
        self._call_stats.count(tool, observation)
        return observation

    def tool_use(self) -> Mapping[str, Mapping[str, int]]:
        """How the calls so far went, by tool."""
        return self._call_stats.as_json()

    async def save(self) -> tuple[dict[str, Any], list[str]]:
        """How the calls went."""
        return {"tally": self.tool_use()}, []

    async def resume(self, saved: Mapping[str, Any], lost: Sequence[str]) -> None:
        """Count on."""
        self._call_stats.resume(saved["tally"])

    async def _call(self, tool: str, arguments: object) -> str:
        try:
            asked = parse_arguments(tool, SearchArguments, arguments)
        except BadArguments as error:
            return str(error)
        before = ((asked.page or 1) - 1) * self._limits.results
        try:
            found = await self._engine.search(asked.query.strip(), before + self._limits.results)
        except BadQuery as error:
            return f"Error: {error}"
        return render(found[before : before + self._limits.results], before, self._limits)

    async def close(self) -> None:
        """There is nothing to let go of: the engine is everybody's."""


class SearchTool:
    """A :class:`~nemo_gym_prorl.tasks.task.ToolSet` of ``search`` alone."""

    schemas: Sequence[Mapping[str, Any]] = (SCHEMA,)

    def __init__(self, engine: SearchEngine, limits: SearchSettings) -> None:
        self._engine = engine
        self._limits = limits

    async def open(self, sandbox: Sandbox | None, needs: SandboxNeeds | None) -> OpenSearch:
        """The tool of a session, when the engine can be asked.

        Raises:
            InfrastructureError: it can't.
        """
        await self._engine.prepare()
        return OpenSearch(self._engine, self._limits)


def render(passages: Sequence[Passage], before: int, limits: SearchSettings) -> str:
    """A page as the policy reads it: numbered, each of bounded length.

    Args:
        passages: of this page.
        before: how many results come before it.
        limits: bounds.
    """
    if not passages:
        return NO_MORE if before else NOTHING
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
    """Searches an :class:`.Index`.

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
        """Return at most ``limit`` passages, best first; none if nothing fits.

        Raises:
            InfrastructureError: the index can't be read.
        """
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


class _Result(BaseModel):
    content: str | None = None
    title: str | None = None
    url: str | None = None


class _Answer(BaseModel):
    results: list[_Result]


def _passages(content: bytes) -> list[Passage]:
    try:
        results = _Answer.model_validate_json(content).results
    except ValidationError as error:
        raise _Trouble("the answer is not the service's", FailureKind.PROVIDER_UNAVAILABLE) from error
    return [Passage(one.content, one.title or "", one.url or "") for one in results if one.content]


class TavilySearch:
    """Searches over HTTP: one JSON request for each search.

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
        """Return at most ``limit`` passages, best first; none if nothing fits.

        Raises:
            BadQuery: the service does not take the query.
            InfrastructureError: the service can't be had.
        """
        body = orjson.dumps({"query": query, "max_results": min(limit, MAX_RESULTS)})
        trouble: _Trouble | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                for pause_s in (0.0, *PAUSES_S):
                    await asyncio.sleep(pause_s)
                    try:
                        return _passages(await self._ask(body))[:limit]
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
        if response.status != 200:
            used_up = response.status in _QUOTA
            kind = FailureKind.PROVIDER_QUOTA_EXHAUSTED if used_up else FailureKind.PROVIDER_UNAVAILABLE
            raise _Trouble(f"HTTP {response.status}", kind)
        return content


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts, size = list[bytes](), 0
    async for part in response.content.iter_chunked(2**16):
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise _Trouble(f"the answer is longer than {MAX_ANSWER_BYTES} bytes", FailureKind.PROVIDER_UNAVAILABLE)
    return b"".join(parts)


SearchEngine = OfflineSearch | TavilySearch
"""Prepared before each session, asked by the tool, and closed with the server."""
