# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The wire to a kernel: ZeroMQ's protocol against ZeroMQ itself, Jupyter's messages, and what a peer can cost."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gym_prorl.sandbox.sessions.jupyter import zmtp
from nemo_gym_prorl.sandbox.sessions.jupyter.channel import FREE_S, SHARE, Channel, connect
from nemo_gym_prorl.sandbox.sessions.jupyter.messages import (
    DELIMITER,
    LARGEST_CONTENT,
    Message,
    MessageReader,
    Requests,
)


SIZES = st.sampled_from([0, 1, 254, 255, 256, 257, 8191, 8192, 70_000])
FRAMES = st.lists(st.binary(max_size=300) | st.builds(bytes, SIZES), min_size=1, max_size=5)
GREETED = zmtp.GREETING + zmtp.ready("ROUTER")


class Recorder:
    """Keeps frames of at most ``largest`` bytes."""

    def __init__(self, largest: int = 1 << 20) -> None:
        self.messages: list[list[bytes | None]] = [[]]
        self._largest = largest

    def room(self, size: int) -> bool:
        return size <= self._largest

    def frame(self, body: bytes | bytearray | None, size: int, more: bool) -> None:
        assert body is None or len(body) == size
        self.messages[-1].append(None if body is None else bytes(body))
        if not more:
            self.messages.append([])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("zmtp") / "socket")


@contextlib.contextmanager
def real_peer(kind: int, address: str) -> Iterator[tuple[zmq.Socket[bytes], socket.socket]]:
    """A socket of libzmq's that listens, and a plain connection to it."""
    with zmq.Context() as context, context.socket(kind) as listener, socket.socket(socket.AF_UNIX) as ours:
        listener.linger = 0
        listener.rcvtimeo = listener.sndtimeo = 5000
        ours.settimeout(5)
        listener.bind(f"ipc://{address}")
        ours.connect(address)
        yield listener, ours


def heard(ours: socket.socket, decoder: zmtp.Decoder, recorder: Recorder, messages: int) -> list[list[bytes | None]]:
    """Read until so many messages are there, or the peer is ready for the first."""
    while len(recorder.messages) <= messages or not decoder.ready:
        data = ours.recv(7000)
        assert data
        decoder.feed(data)
    return recorder.messages[:-1]


@settings(max_examples=40)
@given(there=st.lists(FRAMES, min_size=1, max_size=4), back=st.lists(FRAMES, min_size=1, max_size=4))
def test_a_dealer_and_a_real_router_understand_each_other(
    address: str, there: list[list[bytes]], back: list[list[bytes]]
) -> None:
    with real_peer(zmq.ROUTER, address) as (router, ours):
        ours.sendall(zmtp.GREETING + zmtp.ready("DEALER"))
        recorder = Recorder()
        decoder = zmtp.Decoder(recorder)
        heard(ours, decoder, recorder, 0)
        for frames in there:
            ours.sendall(zmtp.message(frames))
            identity, *got = router.recv_multipart()
            assert got == frames
        for frames in back:
            router.send_multipart([identity, *frames])
        assert heard(ours, decoder, recorder, len(back)) == back


@settings(max_examples=20)
@given(said=st.lists(FRAMES, min_size=1, max_size=4))
def test_a_subscriber_hears_a_real_publisher(address: str, said: list[list[bytes]]) -> None:
    with real_peer(zmq.XPUB, address) as (publisher, ours):
        ours.sendall(zmtp.GREETING + zmtp.ready("SUB"))
        recorder = Recorder()
        decoder = zmtp.Decoder(recorder)
        heard(ours, decoder, recorder, 0)
        ours.sendall(zmtp.message([zmtp.SUBSCRIBE_TO_ALL]))
        assert publisher.recv() == b"\x01"
        for frames in said:
            publisher.send_multipart(frames)
        assert heard(ours, decoder, recorder, len(said)) == said


@given(
    st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(1, 500), min_size=1),
    st.integers(0, 300),
)
def test_frames_are_the_same_however_they_are_cut(messages: list[list[bytes]], cuts: list[int], largest: int) -> None:
    recorder = Recorder(largest)
    decoder = zmtp.Decoder(recorder)
    stream = GREETED + b"".join(map(zmtp.message, messages))
    position = turn = 0
    while position < len(stream):
        size = cuts[turn % len(cuts)]
        decoder.feed(stream[position : position + size])
        position, turn = position + size, turn + 1
    assert recorder.messages[:-1] == [[f if len(f) <= largest else None for f in frames] for frames in messages]


@given(st.binary(max_size=400), st.booleans(), st.integers(1, 50))
def test_any_bytes_are_frames_or_a_violation(data: bytes, greeted: bool, size: int) -> None:
    decoder = zmtp.Decoder(Recorder())
    stream = GREETED + data if greeted else data
    with contextlib.suppress(zmtp.Violation):
        for begin in range(0, len(stream), size):
            decoder.feed(stream[begin : begin + size])


LONG = (1 << 30).to_bytes(8)


@pytest.mark.parametrize(
    "stream",
    [
        b"HTTP/1.1 200 OK".ljust(64),
        zmtp.GREETING.replace(b"NULL", b"CURV"),
        zmtp.GREETING[:10] + b"\x02" + zmtp.GREETING[11:],
        zmtp.GREETING + zmtp.message([b"before it is ready"]),
        zmtp.GREETING + b"\x04\x06\x05ERROR",
        zmtp.GREETING + b"\x06" + LONG,
        GREETED + b"\x06" + LONG,
        GREETED + b"\x05\x00",
        GREETED + b"\x08\x00",
        GREETED + b"\x01\x00" * (zmtp.MOST_FRAMES + 1),
        GREETED + b"\x02" + (zmtp.LARGEST_MESSAGE + 1).to_bytes(8),
        GREETED + b"\x02" + b"\xff" * 8,
    ],
)
def test_what_no_kernel_sends_is_a_violation(stream: bytes) -> None:
    decoder = zmtp.Decoder(Recorder())
    with pytest.raises(zmtp.Violation):
        decoder.feed(stream)


def test_what_nobody_wants_is_not_kept() -> None:
    decoder = zmtp.Decoder(Recorder(1000))
    decoder.feed(GREETED + b"\x03" + (64 << 20).to_bytes(8))
    chunk = bytes(1 << 16)
    tracemalloc.start()
    try:
        for _ in range(1000):
            decoder.feed(chunk)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def read(frames: Sequence[bytes], wanted: bool = True) -> list[Message]:
    """What a reader makes of the frames of a message."""
    found: list[Message] = []
    reader = MessageReader(lambda _kind, _request: wanted, found.append)
    for number, frame in enumerate(frames, 1):
        reader.frame(frame if reader.room(len(frame)) else None, len(frame), number < len(frames))
    return found


HEADERS = (b'{"msg_type": "x"}', b'{"msg_id": "y"}')


@given(st.lists(st.binary() | st.sampled_from([DELIMITER, b"{}", b"[]", b"1", *HEADERS])))
def test_frames_are_a_message_or_none(frames: list[bytes]) -> None:
    assert all((message.kind, message.request) == ("x", "y") for message in read(frames))


def test_a_real_session_understands_a_request_and_is_understood() -> None:
    session = pytest.importorskip("jupyter_client.session")
    requests = Requests()
    real = session.Session(key=requests.key.encode())
    request, frames = requests.make("execute_request", code="print('\udc80é')")
    _names, parts = real.feed_identities(frames)
    parsed = real.deserialize(parts)
    assert parsed["header"]["msg_id"] == request
    assert parsed["msg_type"] == "execute_request"
    assert parsed["content"] == {"code": "print('\udc80é')"}
    answer = real.msg("stream", {"name": "stdout", "text": "é"}, parent=parsed)
    assert read([b"topic", *real.serialize(answer)]) == [Message("stream", request, {"name": "stdout", "text": "é"})]


@pytest.mark.parametrize(
    ("content", "unread"),
    [
        (b'{"text": "' + b"1, [{" * 300_000 + b'"}', False),
        (b'{"text": "' + rb"\"a\", " * 300_000 + b'"}', False),
        (b'{"a": [' + b"[]," * 300_000 + b"1]}", True),
        (b'{"a": [' + b'"",' * 300_000 + b"1]}", True),
        (b'{"a": ["\\"", ' + b"1," * 300_000 + b"1]}", True),
        (b"[" * 300_000, True),
        (b'{"text": "' + b"," * ((1 << 20) - 11) + rb"\"" + b'"}', False),
        (b'{"text": "' + b"x" * LARGEST_CONTENT + b'"}', True),
    ],
)
def test_text_of_any_length_is_read_and_a_flood_of_values_only_counted(content: bytes, unread: bool) -> None:
    (message,) = read([DELIMITER, b"", *HEADERS, b"{}", content])
    assert message.unread == (len(content) if unread else 0)
    assert bool(message.content) != unread
    assert read([DELIMITER, b"", content, content, b"{}", b"{}"]) == []
    (message,) = read([DELIMITER, b"", *HEADERS, b"{}", content], wanted=False)
    assert message == Message("x", "y", {})


async def test_many_that_flood_leave_the_loop_to_others(tmp_path: Path) -> None:
    """All together have their share of the loop's time, and no more."""
    stream = zmtp.message([DELIMITER, b"", *HEADERS, b"{}", b"{}"]) * 1000
    stop = threading.Event()

    def flood(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(GREETED)
            while not stop.is_set():
                connection.sendall(stream)

    channels, threads = [], []
    count = 0

    def tell(_message: Message) -> None:
        nonlocal count
        count += 1

    for number in range(6):
        path = tmp_path / str(number)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        threads.append(threading.Thread(target=flood, args=(listener,)))
        threads[-1].start()
        connection = connect(path)
        assert connection
        channels.append(Channel(connection, "SUB", MessageReader(lambda *_: True, tell), lambda _violation: None))
    try:
        begin, used = time.monotonic(), time.thread_time()
        await asyncio.sleep(1)
        share = (time.thread_time() - used) / (time.monotonic() - begin)
    finally:
        stop.set()
        for channel in channels:
            channel.close()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert count > 0
    assert share < 2 * SHARE + len(channels) * FREE_S


async def test_one_that_takes_nothing_is_lost(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        lost: list[zmtp.Violation | None] = []
        connection = connect(tmp_path / "socket")
        assert connection
        channel = Channel(connection, "DEALER", MessageReader(lambda *_: True, lambda _message: None), lost.append)
        theirs, _ = listener.accept()
        with theirs:
            theirs.sendall(GREETED)
            await asyncio.sleep(0.05)
            channel.send([bytes(4 << 20)])
            assert lost == []
            channel.send([b"the next"])
            assert [type(reason) for reason in lost] == [zmtp.Violation]
