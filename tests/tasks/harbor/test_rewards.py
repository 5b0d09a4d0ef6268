# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Reward files and reports, totals of steps, and archives of artifacts, without sandboxes."""

import io
import tarfile
from pathlib import Path

import pytest

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
    sanitize({"/app/out": raw, "/logs": damaged, "/gone": tmp_path / "gone"}, tmp_path / "clean")
    with tarfile.open(tmp_path / "clean") as archive:
        found = [(member.name, member.mode, member.uid, member.linkname) for member in archive]
    assert found == [
        ("app/out", 0o755, 0, ""),
        ("app/out/fine", 0o755, 0, ""),
        ("app/out/hard", 0o644, 0, "app/out/fine"),
        ("app/out/near", 0o644, 0, "fine"),
        ("app/out/far/python3", 0o644, 0, ""),
    ]
