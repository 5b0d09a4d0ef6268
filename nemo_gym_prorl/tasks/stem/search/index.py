# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""An index of passages on disk: made once by ``prorl data index``, then memory-mapped by whoever searches it.

A folder with bm25s's arrays of scores, the passages one to a line, and where each line begins. What is needed of a
passage is read when it is found, so an index may be larger than memory. Pure of tasks and loops: all of it blocks.
"""

from __future__ import annotations

import mmap
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from nemo_gym_prorl.failures import CallerError, InfrastructureError, is_text
from nemo_gym_prorl.tasks.stem.search.engine import Passage


FORMAT = 1
"""Number of the folder's layout and of how words are made; an index of another one is made anew."""

MAX_PASSAGE_CHARS = 4000
"""A longer text is cut into passages at line ends or spaces, so that what is found is what is read."""

MANIFEST = "index.json"
_PASSAGES = "passages.jsonl"
_OFFSETS = "offsets.npy"
_WORDS = r"(?u)\b\w+\b"
"""Single letters and digits are words: in science they are symbols."""


def _library() -> tuple[Any, Any]:
    try:
        import bm25s
        import Stemmer
    except ModuleNotFoundError as error:
        raise InfrastructureError(
            f"{error.name} is not installed: pip install 'nemo-gym-prorl[stem]'", field="search.engine"
        ) from error
    return bm25s, Stemmer


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
    bm25s, stemmer = _library()
    if folder.exists() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
        raise CallerError("is there and is no index", field=str(folder))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise CallerError(f"cannot be written: {error.strerror or error}", field=str(folder)) from error
    try:
        texts: list[str] = []
        offsets = [0]
        with (work / _PASSAGES).open("wb") as file:
            for passage in passages:
                for piece in _pieces(passage):
                    offsets.append(offsets[-1] + file.write(orjson.dumps(piece, option=orjson.OPT_APPEND_NEWLINE)))
                    texts.append(f"{piece.title}\n{piece.text}")
        if not texts:
            raise CallerError("there is no passage in it", field="corpus")
        np.save(work / _OFFSETS, np.array(offsets, dtype=np.int64))
        index = bm25s.BM25(method="lucene")
        index.index(_tokens(bm25s, stemmer, texts), show_progress=False)
        index.save(work, show_progress=False)
        (work / MANIFEST).write_bytes(orjson.dumps({"format": FORMAT, "passages": len(texts)}))
        work.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
    except OSError as error:
        raise CallerError(f"cannot be written: {error.strerror or error}", field=str(folder)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return len(texts)


class Index:
    """An open index.

    Args:
        folder: where :func:`build` made it.

    Raises:
        InfrastructureError: it is not there, not whole or of another format; names ``search.index``.
    """

    def __init__(self, folder: Path) -> None:
        self._bm25s, stemmer = _library()
        self._stemmer = stemmer
        try:
            manifest = orjson.loads((folder / MANIFEST).read_bytes())
            if manifest["format"] != FORMAT:
                raise ValueError(f"its format is {manifest['format']}, this version reads {FORMAT}")
            self._offsets = np.load(folder / _OFFSETS, mmap_mode="r")
            self._scores = self._bm25s.BM25.load(folder, mmap=True, show_progress=False)
            with (folder / _PASSAGES).open("rb") as file:
                self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.passages = int(manifest["passages"])
            if len(self._offsets) != self.passages + 1 or int(self._offsets[-1]) != len(self._lines):
                raise ValueError("passages are missing")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InfrastructureError(
                f"{folder} can't be searched: {error}; make it with `prorl data index`", field="search.index"
            ) from error

    def search(self, query: str, limit: int) -> Sequence[Passage]:
        """The best passages, best first; those that share no word with the query are none."""
        [words] = _tokens(self._bm25s, self._stemmer, [query])
        known = self._scores.get_tokens_ids(words)
        if not known:
            return []
        scores = self._scores.get_scores_from_ids(known)
        limit = min(limit, self.passages)
        best = np.argpartition(scores, -limit)[-limit:]
        best = best[np.lexsort((best, -scores[best]))]
        return [self._passage(int(number)) for number in best if scores[number] > 0]

    def close(self) -> None:
        """Let go of the files."""
        self._lines.close()

    def _passage(self, number: int) -> Passage:
        begin, end = int(self._offsets[number]), int(self._offsets[number + 1])
        return Passage(**orjson.loads(self._lines[begin:end]))


def _tokens(bm25s: Any, stemmer: Any, texts: Sequence[str]) -> list[list[str]]:
    words: list[list[str]] = bm25s.tokenize(
        list(texts),
        token_pattern=_WORDS,
        stopwords="english",
        # Its own for each call: a stemmer must not be used by two threads at a time.
        stemmer=stemmer.Stemmer("english"),
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
