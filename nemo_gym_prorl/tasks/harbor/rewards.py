# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Read the reward files that a Harbor verifier left on the host, and combine the rewards of a task's steps.

The verifier's folder is untrusted: code of the agent may have written to it. Only regular files of limited size are
read, no symlink is followed, and no read blocks. The folder is read after all processes of the sandbox have ended.

A verdict is a number by key. ``reward.json`` takes precedence over ``reward.txt``, unless the tests only name
``reward.txt``: then a program of the agent that the tests run may have written ``reward.json``. The exit code of the
tests is ignored. There is no verdict if the reward file is missing, empty, damaged or has too large values, or if a
test report is missing that the test script requests. No defect of these files raises an error.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


MAX_REWARD_BYTES = 64 << 10
MAX_REPORT_BYTES = 1 << 20  # bounds how long the JSON parser holds the GIL
MAX_REWARD = 1e6  # a larger reward would ruin the training of a policy
MAX_REWARD_ENTRY = 1e100  # for rewards that are not trained on: keeps their mean over steps finite

STDOUT = "test-stdout.txt"
REWARD_KEY = "reward"
REWARD_FILES = ("reward.txt", "reward.json")

_REPORT_OPTION = re.compile(
    r"""--(?:ctrf|junit-?xml|json-report-file)(?:=|\s+)(?P<quote>["']?)/logs/verifier/(?P<name>[\w./-]+)(?P=quote)"""
)
"""Option that makes pytest write a report to the verifier's folder."""

_SUITE = re.compile(r"<testsuite\s[^<>]*>")  # without "<", so that the scan is linear
_COUNT = re.compile(r'\b(tests|failures|errors|skipped)="(\d{1,9})"')


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one verification."""

    rewards: Mapping[str, float] | None = None  # by key; ``None`` without a verdict
    problem: str = ""  # why there is no verdict, or which reward file was ignored
    output: str = ""  # end of the tests' output


class Unreadable(Exception):
    """A file of the verifier is missing, irregular, too long or malformed."""


def read_outcome(
    folder: Path, script: str, output_bytes: int, key: str, named: Collection[str] = REWARD_FILES
) -> Outcome:
    """Return the outcome of a verification whose ``/logs/verifier`` was this folder of the host.

    Args:
        script: text of the test script, whose options name test reports.
        named: names of reward files that occur in the tests.
    """
    output = note = ""
    try:
        output = _tail(folder / STDOUT, output_bytes)
        name = "reward.json" if os.path.lexists(folder / "reward.json") else "reward.txt"
        if name not in named and "reward.txt" in named:
            name, note = "reward.txt", "reward.json does not count, since no file of the tests names it"
        rewards = _read_rewards(folder, name, key)
        for report in reports_of(script):
            passed = _passed(report, read_file(folder, report, MAX_REPORT_BYTES))
            if passed == 0 and rewards.get(key, 0.0) >= 1.0:
                return Outcome(None, f"the reward is {rewards[key]:g}, but in {report} no test passed", output)
    except Exception as error:  # untrusted files may cause any exception
        reason = str(error) if isinstance(error, Unreadable) else f"its files cannot be read: {error!r:.200}"
        return Outcome(None, "; ".join(filter(None, [reason, note])), output)
    return Outcome(rewards, note, output)


def reports_of(script: str) -> list[str]:
    """Return the paths of test reports that a test script requests, relative to the verifier's folder."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    found = _REPORT_OPTION.finditer("\n".join(lines).replace("\\\n", " "))
    return [name for match in found if ".." not in (name := match["name"]).split("/")]


def read_file(folder: Path, name: str, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes below a folder, without following symlinks."""
    opened = []
    try:
        opened.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        *parents, last = [part for part in name.split("/") if part not in ("", ".")]
        for part in parents:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            opened.append(os.open(part, flags, dir_fd=opened[-1]))
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        opened.append(os.open(last, flags, dir_fd=opened[-1]))
        found = os.fstat(opened[-1])
        if not stat.S_ISREG(found.st_mode):
            raise Unreadable(f"{name} is no regular file")
        if found.st_size > limit:
            raise Unreadable(f"{name} has {found.st_size} bytes; at most {limit} are read")
        return os.pread(opened[-1], limit, 0)
    except FileNotFoundError as error:
        raise Unreadable(f"the tests wrote no {name}") from error
    except OSError as error:
        raise Unreadable(f"{name} cannot be read: {error.strerror}") from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _read_rewards(folder: Path, name: str, key: str) -> dict[str, float]:
    try:
        text = read_file(folder, name, MAX_REWARD_BYTES).decode()
        if not text:
            raise Unreadable(f"{name} is empty")
        found: Any = float(text) if name == "reward.txt" else json.loads(text)
        rewards = found if isinstance(found, dict) else {REWARD_KEY: found}
        "".join(rewards).encode()  # replies contain the keys, and UTF-8 cannot encode lone surrogates
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{name} cannot be parsed: {str(error)[:200]}") from error
    for value in rewards.values():
        if not isinstance(value, int | float):
            raise Unreadable(f"{name} has {value!r:.100}, which is no number")
        if not abs(value) <= MAX_REWARD_ENTRY:
            raise Unreadable(f"{name} has {value!r:.100}, which is not finite or too large")
    if (reward := scalar(rewards, key)) is None:
        keys = f"; set reward_key to one of {', '.join(rewards)}"[:200] if rewards else ""
        raise Unreadable(f"{name} has no reward {key!r}{keys}")
    if abs(reward) > MAX_REWARD:
        raise Unreadable(f"{name} has the reward {reward!r:.100}, beyond {MAX_REWARD:g}")
    return {key: float(value) for key, value in rewards.items()}


def _passed(name: str, content: bytes) -> int | None:
    """Return the number of passed tests in a JUnit XML or JSON report; raises Unreadable for another format."""
    text = content.decode("utf-8", "replace")
    if suites := _SUITE.findall(text):
        counts = [{count: int(value) for count, value in _COUNT.findall(suite)} for suite in suites]
        return sum(2 * one.get("tests", 0) - sum(one.values()) for one in counts)
    try:
        report = json.loads(text)
        summary = report.get("results", report)["summary"]
        return int(summary.get("passed", 0))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Unreadable(f"{name} is no test report") from error


def _tail(path: Path, limit: int) -> str:
    """Return the last ``limit`` bytes of an untrusted file as text; empty if it is no regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return ""
        return os.pread(descriptor, limit, max(0, found.st_size - limit)).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


def below_minimum(rewards: Mapping[str, float], minimum: float | Mapping[str, float] | None) -> str:
    """Return why rewards miss a step's ``min_reward``, or an empty text. A missing key misses any minimum."""
    if minimum is None:
        return ""
    thresholds = minimum if isinstance(minimum, Mapping) else {REWARD_KEY: minimum}
    for key, threshold in thresholds.items():
        if (found := rewards.get(key, -math.inf)) < threshold:
            return f"{key} is {found:g}, below min_reward {threshold:g}"
    return ""


def total(steps: Sequence[Mapping[str, float]], strategy: Literal["mean", "final"] | None) -> dict[str, float]:
    """Return the rewards of a task by key: the mean over the steps, or the last step's. A missing key counts as 0."""
    keys = sorted({key for rewards in steps for key in rewards})
    if strategy == "final":
        return {key: steps[-1].get(key, 0.0) for key in keys}
    return {key: sum(rewards.get(key, 0.0) for rewards in steps) / len(steps) for key in keys}


def scalar(rewards: Mapping[str, float], key: str) -> float | None:
    """Return the reward of ``key``, or the only reward if it has another key; otherwise ``None``."""
    if key in rewards:
        return rewards[key]
    return next(iter(rewards.values())) if len(rewards) == 1 else None
