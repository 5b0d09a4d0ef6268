# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The file of clients' keys: what is refused, what is taken while a service runs, and the commands that write it."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.rollout.access_control import KeysFile, hash_of, new_key, read_clients
from nemo_gym_prorl.serving.keys import Caller, Scope
from tests.rollout.command_line import prorl


OF = {"alice": {"name": "alice", "hash": hash_of("a")}, "bob": {"name": "bob", "hash": hash_of("b"), "share": 3}}


def write(path: Path, *clients: Mapping[str, Any], mode: int = 0o600) -> Path:
    path.write_text(json.dumps({"clients": clients}))
    path.chmod(mode)
    return path


def written(file: str) -> tuple[str, int]:
    [client] = yaml.safe_load(Path(file).read_text())["clients"]
    assert client.keys() == {"name", "hash", "scopes", "share"}
    return client["hash"], Path(file).stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"share": 0}, r"clients\.0\.share: Input should be greater than 0"),
        ({"share": -1}, r"clients\.0\.share: Input should be greater than 0"),
        ({"share": float("nan")}, r"clients\.0\.share"),
        ({"scopes": ["write"]}, r"clients\.0\.scopes\.0: Input should be 'submit', 'read', 'cancel' or 'admin'"),
        ({"scopes": []}, r"clients\.0\.scopes: List should have at least 1"),
        ({"scope": ["read"]}, r"clients\.0\.scope: Extra inputs are not permitted"),
        ({"hash": "a"}, r"clients\.0\.hash: .* must be sha256: and 64 hexadecimal digits"),
        ({"hash": hash_of("a").upper()}, r"clients\.0\.hash"),
        ({"name": "default"}, r"clients\.0\.name: .* is the client of rollouts that name none"),
        ({"name": "a/b"}, r"clients\.0\.name"),
        ({"name": "bob"}, r"clients\.1\.name: another has the same"),
        ({"hash": hash_of("b")}, r"clients\.1\.hash: another has the same"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_the_name_of_its_field(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    path = write(tmp_path / "keys.json", {**OF["alice"], **wrong}, OF["bob"])
    with pytest.raises(CallerError, match=rf"keys_file: {path}: {said}") as refused:
        read_clients(path)
    assert refused.value.field == "keys_file"


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o644])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "keys.json", OF["alice"], mode=mode)
    with pytest.raises(CallerError, match=rf"others may read or write .* \(mode {mode:04o}\): chmod 600"):
        read_clients(path)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"text", b"\xff", b"clients: 3"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(CallerError, match=r"keys\.yaml"):
        read_clients(path)
    with pytest.raises(CallerError, match=r"No such file or directory; `prorl key new` makes one"):
        read_clients(tmp_path / "none.yaml")


def test_a_file_that_changes_is_taken_and_one_that_is_wrong_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now, shares = 0.0, list[Mapping[str, float]]()
    path = write(tmp_path / "keys.json", OF["alice"], OF["bob"])
    keys = KeysFile(path, shares.append, lambda: now)
    alice = Caller("alice", frozenset({Scope.SUBMIT, Scope.READ, Scope.CANCEL}))
    assert keys.caller("a") == alice
    assert keys.caller("c") is None
    assert shares == [{"alice": 1.0, "bob": 3.0}]
    write(path, OF["bob"])
    assert keys.caller("a") == alice, "it is looked at once a second at most"
    now = 1.1
    assert keys.caller("a") is None, "revoked"
    assert shares[1:] == [{"bob": 3.0}]
    for break_it in (lambda: path.write_text("{"), lambda: path.chmod(0o644), path.unlink):
        break_it()
        now += 1.1
        with caplog.at_level(logging.ERROR):
            assert keys.caller("b") is not None
            now += 1.1
            assert keys.caller("b") is not None
        assert "the keys stay as they were before" in caplog.text
        assert len(caplog.records) == 1, "told once"
        caplog.clear()
    write(path, OF["alice"])
    now += 1.1
    assert keys.caller("a") == alice
    assert keys.caller("b") is None
    assert len(shares) == 3


async def test_a_key_from_the_command_line_to_its_end(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.yaml")
    code, key = await prorl("key", "new", "alice", "--file", file, "--scope", "read", "--share", "2.5")
    assert code == 0
    key = key.strip()
    assert written(file) == (hash_of(key), 0o600), "its hash alone is kept"
    assert KeysFile(Path(file), lambda shares: None).caller(key) == Caller("alice", frozenset({Scope.READ}))
    assert (await prorl("key", "new", "alice", "--file", file))[0] == 1, "a name is one client's"
    code, said = await prorl("key", "new", "bob", "--file", file, "--scope", "write")
    assert (code, "scopes.0: Input should be 'submit'" in said) == (1, True)
    assert (await prorl("key", "new", "bob", "--file", file))[0] == 0
    assert await prorl("key", "list", "--file", file) == (0, "alice\t2.5\tread\nbob\t1\tsubmit,read,cancel\n")
    assert (await prorl("key", "revoke", "alicia", "--file", file))[0] == 1
    assert (await prorl("key", "revoke", "alice", "--file", file))[0] == 0
    assert await prorl("key", "list", "--file", file) == (0, "bob\t1\tsubmit,read,cancel\n")
    assert len({new_key() for _ in range(100)}) == 100
    assert all(len(new_key().removeprefix("prorl_")) == 43 for _ in range(10)), "256 bits"
