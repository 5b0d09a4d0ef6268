# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""The journal's tables, in SQLite in a folder of this machine, or in a PostgreSQL; and that one process has them.

A folder is SQLite's: WAL, every commit on the disk before it counts (``synchronous=FULL``). Its locks are one
machine's, so a folder on a file system that machines share is refused.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    LargeBinary,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    insert,
    inspect,
    make_url,
    select,
    update,
)
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from nemo_gym_prorl.disks import kind_under, on_shared_disk
from nemo_gym_prorl.failures import CallerError


SCHEMA = 1
_LOCK_CLASS = 0x70726F72
"""Our advisory locks among those of a PostgreSQL."""
_FILE = "journal.sqlite"

METADATA = MetaData()
META = Table("prorl_meta", METADATA, Column("name", String, primary_key=True), Column("value", String))
JOBS = Table(
    "prorl_jobs",  # accepted, and without an outcome
    METADATA,
    Column("id", String, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("life", BigInteger, nullable=False),
    Column("asked", LargeBinary, nullable=False),
    Column("row", LargeBinary, nullable=False),
)
PLACED = Table(
    "prorl_placed",  # at which node of a fleet, and what it is called there
    METADATA,
    Column("id", String, primary_key=True),
    Column("node", String, nullable=False),
    Column("name", String, nullable=False),
)
ENDED = Table(
    "prorl_ended",  # the log of outcomes; light, so that it is counted and searched without what they are
    METADATA,
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False, index=True),
    Column("number", BigInteger, nullable=False, index=True),
    Column("held", Boolean, nullable=False),
    Column("state", String, nullable=False),
    Column("group", String, index=True),
    Column("ended_at", Float, nullable=False),
    Column("bytes", BigInteger, nullable=False),
)
KEPT = Table(
    "prorl_kept",  # what they are; the content, where there is a folder and it is large, in a file
    METADATA,
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("about", LargeBinary, nullable=False),
    Column("content", LargeBinary),
)
FORGOTTEN = Table(
    "prorl_forgotten",
    METADATA,
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False),
    Index("prorl_forgotten_id", "id"),
)


class Database:
    """The tables of one journal, for this process alone.

    Args:
        place: an absolute folder, or a URL ``postgresql+psycopg://…``.

    Raises:
        CallerError: there is none to be had there; says why and how to mend it.
    """

    def __init__(self, place: str) -> None:
        self.place = _shown(place)
        self.folder: Path | None = None
        self._lock: int | None = None
        self._writer: Connection | None = None
        self._engine: Engine | None = None
        try:
            self._open(place)
        except BaseException as error:
            self.close()
            if isinstance(error, SQLAlchemyError | OSError | ImportError):
                raise _refusal(f"{self.place} cannot be opened: {said(error)}") from error
            raise

    def _open(self, place: str) -> None:
        if "://" in place:
            url = _postgres(place)
            self._engine = create_engine(url, pool_pre_ping=True)
        else:
            self.folder = folder = _folder(place)
            self._lock = _locked(folder)
            # Nobody else's to read, whoever made the folder. SQLite's other files have the mode of this one.
            os.close(os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            for path in folder.glob(f"{_FILE}*"):
                path.chmod(0o600)
            self._engine = create_engine(f"sqlite:///{folder / _FILE}")
            event.listen(self._engine, "connect", _trusted)
        with self.writing() as connection:
            self.epoch, self.life, self.seal = _begin(connection)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction of the one writer. A PostgreSQL's lock is its session's: who lost that writes no more unless
        it has the lock again."""
        assert self._engine is not None, "it is open"
        if self._writer is None:
            writer = self._engine.connect()
            if self.folder is None:
                _lock_session(writer)
            self._writer = writer
        try:
            with self._writer.begin():
                yield self._writer
        except BaseException:
            self._hang_up()
            raise

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Beside the writer."""
        assert self._engine is not None, "it is open"
        with self._engine.connect() as connection:
            yield connection

    def close(self) -> None:
        """Let others have it."""
        self._hang_up()
        if self._engine is not None:
            self._engine.dispose()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _hang_up(self) -> None:
        if (writer := self._writer) is not None:
            self._writer = None
            writer.invalidate()  # not to go back to the pool with a lock
            writer.close()


def _postgres(place: str) -> Any:
    try:
        url = make_url(place)
        if url.drivername != "postgresql+psycopg":
            raise _refusal(f"{_shown(place)} is none of postgresql+psycopg://USER@HOST/DATABASE, and no folder")
        url.get_dialect().import_dbapi()
    except (ArgumentError, NoSuchModuleError) as error:
        raise _refusal(f"{_shown(place)} is no URL: {error}") from error
    except ImportError as error:
        raise _refusal("a PostgreSQL needs its driver: pip install 'nemo-gym-prorl[postgres]'") from error
    return url


def _folder(place: str) -> Path:
    folder = Path(place).expanduser()
    if not folder.is_absolute():
        raise _refusal(f"{place!r} is relative to wherever the server starts; give a folder that begins with /")
    if on_shared_disk(folder):
        raise _refusal(
            f"{folder} is on a file system that machines share ({kind_under(folder)}), where SQLite loses data; name "
            "a folder on this machine's own disk, or a PostgreSQL by its URL"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _locked(folder: Path) -> int:
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's no child holds it on
    except OSError as error:
        owner = os.pread(lock, 200, 0).decode(errors="replace").strip()
        os.close(lock)
        raise _refusal(f"{folder} is in use by {owner or 'another process'}; end that, or name another one") from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{_owner()}\n".encode(), 0)
    return lock


def _lock_session(connection: Connection) -> None:
    schema = func.hashtext(func.current_schema())
    if connection.execute(select(func.pg_try_advisory_lock(_LOCK_CLASS, schema))).scalar():
        connection.commit()
        return
    owner = None
    if inspect(connection).has_table(META.name):
        owner = connection.execute(select(META.c.value).where(META.c.name == "owner")).scalar()
    where = connection.engine.url.render_as_string()
    connection.invalidate()
    raise _refusal(f"{where} is in use by {owner or 'another process'}; end that, or name another one")


def _trusted(connection: Any, _: Any) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> tuple[str, int, bytes]:
    """Epoch of the log, which life of the service this is, and the key that seals clients' places in the log."""
    met: dict[str, str] = {}
    if inspect(connection).has_table(META.name):
        met = {name: value for name, value in connection.execute(select(META.c.name, META.c.value))}
    if met and int(met["schema"]) > SCHEMA:
        raise _refusal(
            f"it was written by a newer version (schema {met['schema']}, this one knows {SCHEMA}); install that, or "
            "name another place"
        )
    METADATA.create_all(connection)
    now = met | {"life": str(int(met.get("life", "0")) + 1), "owner": _owner()}
    now = {"schema": str(SCHEMA), "epoch": uuid.uuid4().hex[:12], "seal": secrets.token_hex(32)} | now
    for name, value in now.items():
        if name in met:
            connection.execute(update(META).where(META.c.name == name).values(value=value))
        else:
            connection.execute(insert(META).values(name=name, value=value))
    return now["epoch"], int(now["life"]), bytes.fromhex(now["seal"])


def _owner() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _refusal(complaint: str) -> CallerError:
    return CallerError(complaint, field="journal")


def _shown(place: str) -> str:
    """Without the password."""
    try:
        return make_url(place).render_as_string() if "://" in place else place
    except ArgumentError:
        return place.split("@")[-1]


def said(error: BaseException) -> str:
    """What a driver complains of, without the statement that it was given."""
    return str(getattr(error, "orig", None) or error)
