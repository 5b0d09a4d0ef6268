# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Reward files and reports, totals of steps, and archives of artifacts, without sandboxes."""

import io
import os
import resource
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_gym_prorl.tasks.harbor import artifacts
from nemo_gym_prorl.tasks.harbor.artifacts import sanitize
from nemo_gym_prorl.tasks.harbor.rewards import below_minimum, read_outcome, reports_of, scalar, total


@pytest.mark.parametrize(
    ("script", "reports"),
    [
        ("uvx pytest --ctrf /logs/verifier/ctrf.json /tests", ["ctrf.json"]),
        (
            "pytest --junitxml='/logs/verifier/a/b.xml'; pytest --json-report-file=/logs/verifier/r.json",
            ["a/b.xml", "r.json"],
        ),
        ("pytest \\\n  --ctrf \\\n  /logs/verifier/ctrf.json", ["ctrf.json"]),
        ("# pytest --ctrf /logs/verifier/ctrf.json", []),
        ("pytest --ctrf /tmp/ctrf.json --ctrf $OUT/a.json --ctrf /logs/verifier/../a", []),
    ],
)
def test_reports_that_a_script_asks_for(script: str, reports: list[str]) -> None:
    assert reports_of(script) == reports


CTRF = '{"results": {"summary": {"tests": 2, "passed": %d, "failed": 1}}}'
JUNIT = '<testsuites><testsuite name="a" errors="0" failures="%d" skipped="1" tests="3"></testsuite></testsuites>'


@pytest.mark.parametrize(
    ("report", "reward", "problem"),
    [
        (CTRF % 1, "1", ""),
        (CTRF % 0, "1", "the reward is 1, but in r no test passed"),
        (CTRF % 0, "0.5", ""),
        (JUNIT % 1, "1", ""),
        (JUNIT % 2, "1", "the reward is 1, but in r no test passed"),
        ('{"summary": {"passed": 1}}', "1", ""),
        ('{"summary": {}}', "1", "the reward is 1, but in r no test passed"),
        ("", "0", "r is no test report"),
        ("[]", "0", "r is no test report"),
        (None, "0", "the tests wrote no r"),
    ],
)
def test_a_report_must_agree(tmp_path: Path, report: str | None, reward: str, problem: str) -> None:
    (tmp_path / "reward.txt").write_text(reward)
    if report is not None:
        (tmp_path / "r").write_text(report)
    outcome = read_outcome(tmp_path, "pytest --ctrf /logs/verifier/r", 100, "reward")
    assert (outcome.problem, outcome.rewards) == (problem, None if problem else {"reward": float(reward)})


DEFECTS = {
    "no bound": ({"reward.txt": "1e308"}, "too large"),
    "no bound for training": ({"reward.txt": "-1000001"}, "beyond 1e+06"),
    "not finite": ({"reward.txt": "inf"}, "not finite"),
    "not a number": ({"reward.txt": "nan"}, "not finite"),
    "no number": ({"reward.txt": "yes"}, "cannot be parsed"),
    "a text in JSON": ({"reward.json": '{"reward": "1"}', "reward.txt": "1"}, "which is no number"),
    "an empty file": ({"reward.txt": ""}, "is empty"),
    "a long file": ({"reward.json": '{"reward": 1}' + " " * (2 << 20)}, "at most 65536 are read"),
    "an integer beyond the largest float": ({"reward.json": '{"reward": 1, "a": %s}' % ("9" * 400)}, "not finite"),
    "two rewards of other names": ({"reward.json": '{"a": 0, "b": 0}'}, "set reward_key to one of a, b"),
    "no reward": ({"reward.json": "{}"}, "no reward 'reward'"),
    "a key that no reply can have": ({"reward.json": '{"reward": 0, "\\ud800": 0}'}, "cannot be parsed"),
    "brackets of any depth": ({"reward.json": "[" * 60_000}, "cannot be parsed"),
    "infinitely many passed tests": (
        {"reward.txt": "1", "r": '{"results": {"summary": {"passed": 1e999}}}'},
        "cannot be read: OverflowError",
    ),
    "a report that is too long": ({"reward.txt": "1", "r": " " * (2 << 20)}, "at most 1048576 are read"),
    "a report of suites without an end": ({"reward.txt": "1", "r": "<testsuite " * 90_000}, "is no test report"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_no_defect_of_a_file_is_a_reward_an_error_or_slow(tmp_path: Path, name: str) -> None:
    files, problem = DEFECTS[name]
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    begin = time.thread_time()
    outcome = read_outcome(tmp_path, "pytest --ctrf /logs/verifier/r" if "r" in files else "", 100, "reward")
    assert time.thread_time() - begin < 1
    assert outcome.rewards is None
    assert problem in outcome.problem


@pytest.mark.parametrize(
    ("named", "rewards"),
    [(["reward.txt"], {"reward": 0.0}), (["reward.json"], {"reward": 1.0}), ([], {"reward": 1.0})],
)
def test_a_reward_file_counts_if_the_tests_name_it(
    tmp_path: Path, named: list[str], rewards: dict[str, float]
) -> None:
    (tmp_path / "reward.txt").write_text("0")
    (tmp_path / "reward.json").write_text('{"reward": 1}')
    outcome = read_outcome(tmp_path, "", 100, "reward", named)
    assert (outcome.rewards, bool(outcome.problem)) == (rewards, named == ["reward.txt"])


def test_totals_minima_and_the_reward_that_counts() -> None:
    steps = [{"reward": 1.0}, {"reward": 0.0, "speed": 4.0}]
    assert total(steps, None) == total(steps, "mean") == {"reward": 0.5, "speed": 2.0}
    assert total([*steps, {}], "final") == {"reward": 0.0, "speed": 0.0}
    assert below_minimum({"reward": 0.5}, 0.5) == below_minimum({}, None) == ""
    assert below_minimum({"reward": 0.5}, 0.6) == "reward is 0.5, below min_reward 0.6"
    assert below_minimum({"reward": 1.0}, {"speed": -5.0}) == "speed is -inf, below min_reward -5"
    assert [scalar(one, "reward") for one in ({"reward": 1.0, "b": 2.0}, {"b": 2.0}, {"a": 1.0, "b": 2.0})] == [
        1.0,
        2.0,
        None,
    ]


def test_an_archive_keeps_what_is_declared_and_nothing_through_links(tmp_path: Path) -> None:
    def entry(name: str, kind: bytes = tarfile.REGTYPE, linkname: str = "", mode: int = 0o644) -> tarfile.TarInfo:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.mode, info.uid = kind, linkname, mode, 1234
        return info

    members = [
        entry("app/out", tarfile.DIRTYPE, mode=0o2755),
        entry("app/out/fine", mode=0o4755),
        entry("app/out/hard", tarfile.LNKTYPE, "app/out/fine"),
        entry("app/out/near", tarfile.SYMTYPE, "fine"),
        entry("app/out/near/below"),
        entry("app/out/over", tarfile.SYMTYPE, "near/../../out/x"),
        entry("app/out/far", tarfile.SYMTYPE, "/usr/bin"),
        entry("app/out/far/python3"),
        entry("app/out/up", tarfile.SYMTYPE, "../../usr"),
        entry("app/out/stolen", tarfile.LNKTYPE, "etc/shadow"),
        entry("app/out/../../usr/bin/python3"),
        entry("/usr/bin/bash"),
        entry("app/outside"),
        entry("app/out/pipe", tarfile.FIFOTYPE),
        entry("app/out/device", tarfile.CHRTYPE),
    ]
    raw = tmp_path / "raw"
    with tarfile.open(raw, "w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO() if member.isreg() else None)
    damaged = tmp_path / "damaged"
    damaged.write_bytes(raw.read_bytes()[:700] + b"x" * 2000)
    sanitize({0: ("app/out", raw), 2: ("logs", damaged)}, tmp_path / "clean")
    with tarfile.open(tmp_path / "clean") as archive:
        found = [(member.name, member.mode, member.uid, member.linkname) for member in archive]
    assert found == [
        ("app/out", 0o755, 0, ""),
        ("app/out/fine", 0o755, 0, ""),
        ("app/out/hard", 0o644, 0, "app/out/fine"),
        ("app/out/near", 0o644, 0, "fine"),
        ("app/out/over", 0o644, 0, "../out/x"),
        ("app/out/far/python3", 0o644, 0, ""),
    ]


def _header(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, fields: dict[str, str] | None = None) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.pax_headers = kind, size, fields or {}
    return info.tobuf(tarfile.PAX_FORMAT if fields else tarfile.USTAR_FORMAT)


def _long(path: Path) -> None:
    path.write_bytes(_header("x", tarfile.XHDTYPE, 400 << 20))
    os.truncate(path, 500 << 20)


FINE = _header("app/fine")
HOSTILE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a header of 400 MiB": (_long, []),
    "a name of 1 MiB": (
        lambda path: path.write_bytes(FINE + _header("app/x", fields={"path": "y" * (1 << 20)})),
        ["app/fine"],
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_takes_little(tmp_path: Path, name: str) -> None:
    write, found = HOSTILE[name]
    write(tmp_path / "raw")
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    sanitize({0: ("app", tmp_path / "raw")}, tmp_path / "clean")
    assert time.thread_time() - begin < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10
    assert (tmp_path / "clean").stat().st_size < 1 << 20
    with tarfile.open(tmp_path / "clean") as archive:
        assert archive.getnames() == found


def test_members_count_for_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MAX_BYTES", 1 << 20)
    (tmp_path / "raw").write_bytes(FINE * 20_000)
    sanitize({0: ("app", tmp_path / "raw")}, tmp_path / "clean")
    with tarfile.open(tmp_path / "clean") as archive:
        assert 0 < len(archive.getnames()) < 100
