# SPDX-License-Identifier: Apache-2.0
"""Which worker has a rollout, and where HTTP messages end: the pure parts of a server of several processes."""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from itsdangerous import TimestampSigner

from nemo_gym_prorl.handlers.conversation import rollout_path
from nemo_gym_prorl.handlers.gym_http import in_header
from nemo_gym_prorl.policy.header_text import header_text
from nemo_gym_prorl.policy.metrics import PolicyMetrics, SharedMetrics
from nemo_gym_prorl.policy.pool.pool import BackendPool
from nemo_gym_prorl.policy.workers.framing import HEAD_BYTES, Body, Malformed, read_head, without_upgrade
from nemo_gym_prorl.policy.workers.shards import OwnSessions, Shard, rollout_of, shard_of


COOKIE = "ProrlModel___policy_model"
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0\r\n"), min_size=1, max_size=30)


def cookie_of(session: dict, name: str = COOKIE) -> bytes:
    """As Starlette's sessions write it."""
    signed = TimestampSigner("any").sign(b64encode(json.dumps(session).encode()))
    return b"other=1; " + name.encode() + b"=" + signed + b"; last=x"


def named(target: bytes, **headers: bytes) -> str | None:
    given = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    return rollout_of(target, given, COOKIE, "session_id")


@given(NAMES, st.integers(1, 16))
def test_a_rollout_has_one_worker_however_it_is_named(name: str, count: int) -> None:
    """As our own agent names it in a header and in a path, and as others may write the same path."""
    header = named(b"/v1/responses", x_rollout_id=in_header(name).encode("latin-1"))
    path = named(rollout_path(name).encode() + b"/tokens")
    raw = named(
        quote(f"/v1/rollouts/{name}/waited?x=1", safe="").replace("%3Fx%3D1", "?x=1").encode().replace(b"%2F", b"/")
    )
    assert header == path == name
    assert raw == name
    assert 0 <= shard_of(name, count) < count


@given(st.binary(max_size=40))
def test_a_header_is_read_as_the_worker_reads_it(value: bytes) -> None:
    text = value.decode("latin-1")
    try:
        expected = unquote(value.decode())
    except UnicodeDecodeError:
        expected = unquote(text)
    assert header_text(text) == expected


@given(st.uuids().map(str), st.binary(max_size=60))
def test_a_session_is_found_in_its_cookie_and_nonsense_is_no_session(session: str, nonsense: bytes) -> None:
    assert named(b"/v1/responses", cookie=cookie_of({"session_id": session})) == session
    assert named(b"/v1/responses", cookie=cookie_of({"session_id": session}), x_rollout_id=b"r") == "r"
    assert named(b"/v1/responses", cookie=cookie_of({"session_id": session}, "Other")) is None
    assert named(b"/v1/responses", cookie=cookie_of({"other": session})) is None
    named(b"/v1/responses", cookie=COOKIE.encode() + b"=" + nonsense)
    assert named(b"/v1/backends") is None


@given(st.integers(1, 12))
def test_a_worker_gives_ids_that_lead_back_to_it(count: int) -> None:
    for index in range(count):
        assert shard_of(Shard(index, count).new_id(), count) == index


def test_rollouts_are_spread_evenly() -> None:
    spread = Counter(shard_of(f"group-7-rollout-{index}-1", 8) for index in range(8000))
    assert min(spread.values()) > 850
    assert max(spread.values()) < 1150


@pytest.mark.parametrize(("headers", "kept"), [([], False), ([(b"x-rollout-id", b"r")], True)])
async def test_a_new_session_is_the_workers_own(headers: list, kept: bool) -> None:
    shard = Shard(1, 4)
    strange = next(name for name in map(str, range(100)) if not shard.has(name))
    scope = {"type": "http", "headers": headers, "session": {"session_id": strange}}

    async def nothing(*_: object) -> None:
        pass

    await OwnSessions(nothing, shard, "session_id")(scope, nothing, nothing)
    assert (scope["session"]["session_id"] == strange) is kept
    assert shard.has(scope["session"]["session_id"]) is not kept


# Messages

CHUNK = st.binary(min_size=1, max_size=40)


def in_chunks(parts: list[bytes]) -> bytes:
    return b"".join(b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\nTrailer: x\r\n\r\n"


@given(st.lists(CHUNK, max_size=5), st.booleans(), st.binary(max_size=30), st.data())
def test_a_message_ends_at_the_same_byte_however_it_is_cut(
    parts: list[bytes], chunked: bool, more: bytes, data: st.DataObject
) -> None:
    content = in_chunks(parts) if chunked else b"".join(parts)
    length = b"Transfer-Encoding: Chunked" if chunked else b"content-length: %d" % len(content)
    stream = b"POST /x HTTP/1.1\r\nHost: h\r\n" + length + b"\r\n\r\n" + content + more
    head = read_head(stream)
    assert head is not None
    for cut in range(head.size):
        assert read_head(stream[:cut]) is None
    body, position, rest = Body(head.length or 0, head.chunked), head.size, stream[head.size :]
    while rest and not body.done:
        piece = rest[: data.draw(st.integers(1, len(rest)))]
        taken = body.take(piece)
        assert taken == len(piece) or body.done
        position, rest = position + taken, rest[taken:]
    assert body.done
    assert stream[position:] == more


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 1\r\nContent-Length: 2",
        b"Content-Length: 1\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: gzip, chunked",
        b"Content-Length: +1",
        b"Content-Length: 1, 1",
        b"Content-Length : 1",
        b" Content-Length: 1",
        b"A: b\nContent-Length: 1",
        b"A: b\rContent-Length: 1",
        b"nothing",
        b"A: " + b"b" * HEAD_BYTES,
    ],
)
def test_what_two_readers_could_understand_in_two_ways_is_refused(lines: bytes) -> None:
    with pytest.raises(Malformed):
        read_head(b"POST / HTTP/1.1\r\n" + lines + b"\r\n\r\n")


def test_a_tunnel_is_refused() -> None:
    with pytest.raises(Malformed, match="CONNECT"):
        read_head(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n")


def test_of_two_headers_the_first_is_read_as_in_the_worker() -> None:
    head = read_head(
        b"GET / HTTP/1.1\r\nX-Rollout-Id: a\r\nX-Rollout-Id: b\r\nConnection: x\r\nConnection: close\r\n\r\n"
    )
    assert head is not None
    assert head.headers[b"x-rollout-id"] == b"a"
    assert head.closes(b"HTTP/1.1")


def test_an_offer_of_another_protocol_is_left_out() -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUPGRADE: h2c\r\n"
    given = b"POST / HTTP/1.1\r\nHost: a\r\n" + offer + b"Content-Length: 3\r\n\r\n"
    assert without_upgrade(given) == b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n"


@pytest.mark.parametrize("content", [b"x\r\n", b"\r\n", b"-1\r\n", b"1\r\nab\r\n", b"1\na\r\n", b"1" * 5000])
def test_chunks_that_are_none_are_refused(content: bytes) -> None:
    with pytest.raises(Malformed):
        Body(None, True).take(content)


# Metrics


def value(text: bytes, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.decode().splitlines() if line.startswith(name))


def test_sums_over_workers_never_fall() -> None:
    pool = BackendPool()
    shared, workers = SharedMetrics(pool), [PolicyMetrics(pool), PolicyMetrics(pool)]
    for metrics in workers:
        metrics.forks.labels("again").inc(2)
        metrics.finished(3)
    for index, metrics in enumerate(workers):
        shared.told(index, metrics.samples())
    assert value(shared.exposition({}, 0), "prorl_policy_forks_total") == 4
    shared.gone(0)
    fresh = PolicyMetrics(pool)
    fresh.forks.labels("edited").inc()
    shared.told(0, fresh.samples())
    said = shared.exposition({"worker0": 5}, 1)
    assert value(said, "prorl_policy_forks_total") == 5
    assert value(said, 'prorl_policy_branches_bucket{le="3.0"}') == 2
    assert value(said, 'prorl_policy_process_memory_bytes{process="worker0"}') == 5
    assert said.count(b"# TYPE prorl_policy_branches histogram") == 1
