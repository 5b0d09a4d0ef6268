# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The offline index and the tool over it."""

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_gym_prorl.failures import CallerError, FailureKind, InfrastructureError
from nemo_gym_prorl.tasks.stem.search import (
    MAX_PASSAGE_CHARS,
    NO_MORE_RESULTS,
    NO_RESULTS,
    BadQuery,
    Index,
    OfflineSearch,
    Passage,
    SearchSettings,
    SearchTool,
    build,
    render,
)


PASSAGES = (
    Passage("The speed of light c is 299792458 m/s.", "Light", "physics/1"),
    Passage("Sound travels at 343 m/s in air, far slower than light.", "Sound"),
    Passage("Mitochondria make ATP.", "Cells"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert build(PASSAGES, tmp_path / "index") == 3
    return tmp_path / "index"


@pytest.mark.parametrize(
    ("query", "titles"),
    [
        ("speed of light", ["Light", "Sound"]),
        ("c", ["Light"]),
        ("how are mitochondria", ["Cells"]),
        ("zebra", []),
        ("the of and", []),
    ],
)
def test_the_best_passages_come_first(folder: Path, query: str, titles: list[str]) -> None:
    index = Index(folder)
    assert [passage.title for passage in index.search(query, 10)] == titles
    assert [passage.title for passage in index.search(query, 1)] == titles[:1]
    index.close()


def test_a_long_text_is_several_passages_and_none_is_lost(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(3000)]
    pieces = build([Passage(" ".join(words)), Passage("  "), Passage("half a pair \ud800")], tmp_path / "index")
    assert pieces > 3
    index = Index(tmp_path / "index")
    for word in (words[0], words[1500], words[-1]):
        [found] = index.search(word, 5)
        assert len(found.text) <= MAX_PASSAGE_CHARS
        assert word in found.text.split()
    index.close()


def test_an_index_is_replaced_whole_and_nothing_else_is(folder: Path, tmp_path: Path) -> None:
    old = Index(folder)
    assert build([Passage("zebras")], folder) == 1
    new = Index(folder)
    assert new.search("zebra", 5) == [Passage("zebras")]
    assert old.search("atp", 5) == [PASSAGES[2]], "whoever has it open goes on"
    with pytest.raises(CallerError, match="no passage"):
        build([Passage("")], folder)
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"], "something was left behind"
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(CallerError, match="is no index"):
        build(PASSAGES, tmp_path / "notes")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": shutil.rmtree,
    "no corpus": lambda folder: (folder / "corpus.jsonl").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_an_index_that_is_no_good_is_our_trouble(folder: Path, damage: str) -> None:
    DAMAGES[damage](folder)
    engine = OfflineSearch(lambda: Index(folder))
    with pytest.raises(InfrastructureError, match="prorl data index") as error:
        await SearchTool(engine, SearchSettings()).prepare()
    assert (error.value.kind, error.value.field) == (FailureKind.PROVIDER_UNAVAILABLE, "search.index")
    shutil.rmtree(folder, ignore_errors=True)
    build(PASSAGES, folder)
    assert await engine.search("atp", 1) == [PASSAGES[2]], "mended, it is found"
    await engine.aclose()


async def test_nothing_of_it_is_done_in_the_event_loop(folder: Path) -> None:
    threads = []

    def opening() -> Index:
        threads.append(threading.current_thread())
        return Index(folder)

    engine = OfflineSearch(opening)
    await asyncio.gather(*(engine.prepare() for _ in range(5)))
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
    await engine.aclose()


class Engine:
    def __init__(self) -> None:
        self.limits: list[int] = []

    async def prepare(self) -> None: ...

    async def search(self, query: str, limit: int) -> list[Passage]:
        self.limits.append(limit)
        if query == "bad":
            raise BadQuery("the search engine does not take this query.")
        return [Passage("x" * 500, f"T{n}\nT", f"s{n}") for n in range(min(limit, 12))]

    async def aclose(self) -> None: ...


async def test_pages() -> None:
    engine = Engine()
    tool = SearchTool(engine, SearchSettings(results=5, passage_chars=100))
    first = await tool.call({"query": "x"})
    assert first.startswith("[1] T0 T - s0\n" + "x" * 100 + " [...]\n\n[2] T1 T - s1\n")
    assert first.count("[...]") == 5
    assert (await tool.call({"query": "x", "page": 3})).count("[...]") == 2
    assert await tool.call({"query": "x", "page": 4}) == NO_MORE_RESULTS
    assert engine.limits == [5, 15, 20]
    assert render([], 0, SearchSettings()) == NO_RESULTS


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "query: Field required"),
        ({"query": "x" * 401}, "at most 400"),
        ({"query": "x", "page": 5}, "page: "),
        ({"query": "bad"}, "Error: the search engine does not take this query."),
    ],
    ids=str,
)
async def test_a_bad_query_is_an_observation(arguments: object, says: str) -> None:
    tool = SearchTool(Engine(), SearchSettings())
    observation = await tool.call(arguments)
    assert observation.startswith("Error")
    assert says in observation
