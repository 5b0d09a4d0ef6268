# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The server's end of a kernel's pipes: any fragmentation, and any writer."""

from __future__ import annotations

import asyncio
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.sandbox.sessions.kernel_pipes import (
    BEGINS,
    ENDS,
    MAX_EVENT_BYTES,
    MAX_PARTS,
    RECORD,
    SIZE,
    WORD_BYTES,
    EventReader,
    KernelPipes,
    MarkedText,
)
from tests.sandbox.running import until


MARK = b"\0mark"
TEXTS = st.binary(max_size=20) | st.sampled_from([b"\0", b"\0mar", b"\0\0mark", b"mark", b"\0mark       1"[:-1]])
WORDS = st.sampled_from([b"1", b"99999999"])
CUTS = st.lists(st.integers(1, 7), min_size=1)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Split data into pieces of these sizes, cyclically."""
    found = []
    while data:
        size = cuts[len(found) % len(cuts)]
        found.append(data[:size])
        data = data[size:]
    return found


def record(part: bytes, flags: int = BEGINS | ENDS) -> bytes:
    return RECORD.pack(len(part), flags) + part


def event(*parts: bytes) -> bytes:
    return b"".join(SIZE.pack(len(part)) + part for part in parts)


@given(st.lists(TEXTS | WORDS.map(lambda word: (word,)), max_size=8), CUTS)
def test_marks_are_found_in_any_pieces(stream: list[bytes | tuple[bytes]], cuts: list[int]) -> None:
    sent = b"".join(one if isinstance(one, bytes) else MARK + one[0].rjust(WORD_BYTES) for one in stream)
    told: list[bytes | tuple[bytes]] = []
    reader = MarkedText(MARK, told.append, lambda word: told.append((word,)))
    for piece in pieces(sent, cuts):
        reader.feed(piece)
        assert len(reader._held) < len(MARK) + WORD_BYTES
    reader.flush()
    split = re.split(re.escape(MARK) + b"(.{%d})" % WORD_BYTES, sent, flags=re.DOTALL)
    expected = [(part.strip(),) if number % 2 else part for number, part in enumerate(split)]
    joined: list[bytes | tuple[bytes]] = [b""]
    for one in told:
        if isinstance(one, bytes) and isinstance(joined[-1], bytes):
            joined[-1] += one
        else:
            joined += [one] if isinstance(one, bytes) else [one, b""]
    assert joined == expected


@given(st.lists(st.lists(st.binary(max_size=30), min_size=1, max_size=5), max_size=5), st.integers(1, 20), CUTS)
def test_events_are_put_together_from_any_pieces(events: list[list[bytes]], room: int, cuts: list[int]) -> None:
    sent = b""
    for one in events:
        whole = event(b"kind", *one)
        parts = [whole[at : at + room] for at in range(0, len(whole), room)]
        # An interrupted event precedes each event.
        sent += record(b"begun", BEGINS)
        for number, part in enumerate(parts):
            sent += record(part, BEGINS * (number == 0) | ENDS * (number == len(parts) - 1))
        sent += record(b"left over", ENDS)
    told: list[list[bytes]] = []
    reader = EventReader(lambda kind, parts: told.append([kind.encode(), *parts]))
    for piece in pieces(sent, cuts):
        reader.feed(piece)
    assert told == [[b"kind", *one] for one in events]


FORGED = {
    "nothing": record(b""),
    "more than there is": record(SIZE.pack(9) + b"short"),
    "too many parts": record(event(*[b""] * (MAX_PARTS + 1))),
    "without end": record(b"", BEGINS) + record(bytes(60_000), 0) * (MAX_EVENT_BYTES // 60_000 + 1),
    "half a pair": record(event(b"data", b"text/plain")),
    "no number": record(event(b"omitted", b"many")),
}


@pytest.mark.parametrize("sent", FORGED.values(), ids=FORGED)
async def test_what_no_driver_sends_ends_the_kernel(sent: bytes) -> None:
    lost: list[str] = []
    pipes = KernelPipes(lost.append)
    _text, _, _, events = pipes.driver_ends
    try:
        writing = asyncio.create_task(asyncio.to_thread(os.write, events, sent))
        await until(lambda: bool(lost))
    finally:
        pipes.close()
    await asyncio.gather(writing, return_exceptions=True)
    assert len(lost) == 1
    assert lost[0].startswith("it sends ")


async def test_a_kernel_that_takes_nothing_is_ended() -> None:
    lost: list[str] = []
    pipes = KernelPipes(lost.append)
    pipes.begin("x" * (1 << 20), 1000)
    assert lost == []
    pipes.begin("next", 1000)
    pipes.close()
    assert lost == ["it does not read its cells"]
