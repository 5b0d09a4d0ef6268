# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The watchdog's decisions: which sandboxes are looked at, and which processes are killed."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.sandbox.limits import usage
from nemo_gym_prorl.sandbox.limits.usage import (
    MAX_FOLDERS,
    MAX_SCAN_S,
    MIN_ENTRY_BYTES,
    DiskScan,
    DiskUsage,
    Process,
    scan,
)
from nemo_gym_prorl.sandbox.limits.watchdog import MAX_MEASUREMENTS_OVER_LIMIT, SCAN_PAUSE_S, Watched, WatchList
from nemo_gym_prorl.sandbox.supervisor.watchdog_process import UsageMonitor


MIB = 1 << 20
INIT = 99


def box(name: str = "b", memory: int = 100, disk: int = 50, *, in_memory: bool = False) -> Watched:
    return Watched(name, 1, INIT, "", "", memory * MIB, disk * MIB, in_memory=in_memory)


def process(pid: int, ticks: int = 0, resident: int = 10) -> Process:
    return Process(pid, 1, ticks, resident * MIB)


def sizes(*of_processes: int) -> dict[int, int]:
    return {number: size * MIB for number, size in enumerate(of_processes, 1)}


def test_a_sandbox_is_hot_if_a_process_worked_started_or_ended() -> None:
    one = box()
    assert one.hot
    one.record_measurement([process(1), process(2)])
    assert one.hot
    one.unmeasured = False
    one.record_measurement([process(1), process(2)])
    assert not one.hot
    assert not one.unmeasured
    for seen in ([process(1), process(2, 1)], [process(1)], [process(1), process(3)]):
        one.record_measurement(seen)
        assert one.hot
        assert one.unmeasured


def test_cold_sandboxes_are_looked_at_in_rotation() -> None:
    watched = WatchList()
    for name in "abcd":
        watched.all[name] = box(name)
        watched.all[name].hot = name == "d"
    assert [one.name for one in watched.hot()] == ["d"]
    assert "".join(next(watched.cold()).name for _ in range(5)) == "abcab"


@given(st.lists(st.integers(0, 60), max_size=30), st.integers(0, 99), st.sets(st.integers(1, 30)))
def test_as_many_have_to_go_as_it_takes(of_processes: list[int], first: int, killed: set[int]) -> None:
    """Victims are no more than needed: processes killed before count as freed memory."""
    one = box(memory=100)
    one.killed = set(killed)
    crowd = sizes(*of_processes)
    before = sum(of_processes) + first
    excess = one.memory_victims(crowd | {INIT: first * MIB})
    if before <= 100:
        assert excess is None
        return
    assert excess
    victims = excess[0]
    assert INIT not in victims
    gone = [crowd[pid] // MIB for pid in victims]
    assert before - sum(gone) <= 100
    assert before - sum(gone[:-1]) > 100
    old = [pid for pid in victims if pid in killed]
    assert victims[: len(old)] == old
    new = [pid for pid in victims if pid not in killed]
    if new:
        assert set(old) == killed & crowd.keys()
        spared = crowd.keys() - set(victims)
        assert all(crowd[pid] <= crowd[other] for pid in spared for other in new)
    assert one.killed == (killed & crowd.keys()) | set(victims)


def test_a_sandbox_over_its_memory_look_after_look_ends() -> None:
    one = box(memory=100)
    for _ in range(2):
        for _ in range(MAX_MEASUREMENTS_OVER_LIMIT):
            assert one.memory_victims(sizes(60, 70)) == ([2], "memory: 130 MiB in use of 100 MiB")
        assert one.memory_victims(sizes(60)) is None, "a look below the limit starts the count again"
    for number in range(MAX_MEASUREMENTS_OVER_LIMIT):
        assert one.memory_victims({1000 + number: 101 * MIB}), "other processes each time"
    victims = one.memory_victims(sizes(101))
    assert victims == ([], "memory: 101 MiB in use of 100 MiB, although processes were killed for it")


def test_a_layer_in_memory_counts_as_memory() -> None:
    one = box(memory=100, in_memory=True)
    one.disk = 45 * MIB
    assert one.memory_victims(sizes(30, 40)) == ([2], "memory: 115 MiB in use of 100 MiB")
    one.disk = 101 * MIB
    assert one.may_exceed_memory([process(1)])
    assert one.memory_victims(sizes(30)) == ([], "memory: 131 MiB in use of 100 MiB"), "no process's end would help"


def test_active_sandboxes_are_scanned_least_recently_scanned_first() -> None:
    watched = WatchList()
    for number, name in enumerate("abc"):
        watched.all[name] = box(name)
        watched.all[name].scanned = 10.0 - number
    watched.all["c"].unmeasured = False
    watched.all["n"] = box("n", memory=0, disk=0)
    assert watched.next_to_scan(100.0) is watched.all["b"]
    assert watched.next_to_scan(10.0 - 1 + SCAN_PAUSE_S / 2) is None
    watched.all["b"].scanned = 90.0
    assert watched.next_to_scan(100.0) is watched.all["a"]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (DiskUsage(50 * MIB), ""),
        (DiskUsage(51 * MIB), "disk: wrote 51 MiB of 50 MiB"),
        (DiskUsage(seconds=MAX_SCAN_S), ""),
        (DiskUsage(seconds=MAX_SCAN_S + 1), "disk: too many files and folders to measure within 10 s"),
    ],
)
def test_a_scan_ends_the_sandbox_at_its_limits(found: DiskUsage, reason: str) -> None:
    assert box().disk_violation(found) == reason
    assert box(disk=0).disk_violation(found) == ""


def test_a_scan_misses_nothing(tmp_path: Path) -> None:
    """Wide and deep folders, and an empty file, which counts as a block."""
    most = 0
    for top in range(150):
        for below in range(70 if top in {3, 140} else 1):
            folder = tmp_path.joinpath(str(top), *["d" * 100] * (25 if top == 7 else 1), str(below))
            folder.mkdir(parents=True)
            folder.joinpath("file").write_bytes(b"x" * most)
            most += 1
    found = scan(str(tmp_path), sys.maxsize)
    files = folders = 0
    for _path, inner, outer in os.walk(tmp_path):
        folders += len(inner)
        files += len(outer)
    assert found.disk == (files + folders) * MIN_ENTRY_BYTES
    assert found.largest == most - 1


def test_a_scan_in_parts_is_a_whole_one(tmp_path: Path) -> None:
    for number in range(300):
        tmp_path.joinpath(str(number)).write_bytes(b"x" * number)
    parts, ended = DiskScan(str(tmp_path), (), sys.maxsize), False
    assert not parts.advance(0)
    assert parts.found.disk < 300 * MIN_ENTRY_BYTES
    while not ended:
        ended = parts.advance(0)
    whole = scan(str(tmp_path), sys.maxsize)
    assert (parts.found.disk, parts.found.largest) == (whole.disk, whole.largest)


def test_a_large_scan_delays_no_others_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scans take turns: of the first sandbox one never ends."""
    entries, (ours, theirs) = usage._entries, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(usage, "_entries", lambda folder, *_: count() if folder == "large" else entries(folder, *_))
    tmp_path.joinpath("file").write_bytes(b"x" * 2 * MIB)
    monitor = UsageMonitor(ours)
    for name, folder in (("first", "large"), ("second", str(tmp_path))):
        watched = {"space": 1, "init": 1, "group": "", "memory_limit": 0, "disk_limit": MIB}
        monitor.handle({"watch": {"name": name, "folder": folder, **watched}})
    threading.Thread(target=monitor.scan_disks, daemon=True).start()
    theirs.settimeout(5)
    try:
        assert json.loads(theirs.recv(10_000))["sandbox"] == "second"
    finally:
        monitor.watched.all.clear()


@pytest.mark.parametrize(
    ("bound", "value"),
    [("MAX_FOLDERS", 50), ("MAX_SCAN_S", 0.0), ("MIN_ENTRY_BYTES", MIB)],
    ids=["folders", "time", "bytes"],
)
def test_a_scan_stops_at_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: float) -> None:
    monkeypatch.setattr(usage, bound, value)
    for number in range(60):
        tmp_path.joinpath(str(number), "below").mkdir(parents=True)
    found = scan(str(tmp_path), 50 * MIB)
    assert found.disk < 120 * usage.MIN_ENTRY_BYTES
    assert found.crowded == (bound == "MAX_FOLDERS")
    assert box().disk_violation(DiskUsage(crowded=True)) == f"disk: more than {MAX_FOLDERS} folders"
