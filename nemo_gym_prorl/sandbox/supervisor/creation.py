# SPDX-License-Identifier: Apache-2.0
"""How a sandbox comes up, by either way: from the mould of its image, or by the container runtime.

Both end alike: the first process says so on the sandbox's channel, it is noted down, limits are set, and the sandbox
is up. Where a mould does not work and the order leaves the way open, the runtime has its turn, and the reason is told.

Only so many are created at a time (:data:`AT_ONCE`); others wait, and commands in other sandboxes go between. An image
whose sandboxes come up slowly, or never, holds up its own: the first of another goes before them.
"""

from __future__ import annotations

import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from nemo_gym_prorl.sandbox.isolation import joining
from nemo_gym_prorl.sandbox.isolation.mould.cast import Mould, cast, image_for, preliminaries
from nemo_gym_prorl.sandbox.launcher import requests
from nemo_gym_prorl.sandbox.limits import cgroups, kernel_shares
from nemo_gym_prorl.sandbox.runtime import image_environment
from nemo_gym_prorl.sandbox.runtime import log as logs
from nemo_gym_prorl.sandbox.runtime.command import runtime_command
from nemo_gym_prorl.sandbox.runtime.launch import become_runtime
from nemo_gym_prorl.sandbox.supervisor.moulds import Moulds
from nemo_gym_prorl.sandbox.supervisor.processes.children import Children, failure, in_words
from nemo_gym_prorl.sandbox.supervisor.processes.event_loop import Loop
from nemo_gym_prorl.sandbox.supervisor.processes.launcher import TRIES, Launcher
from nemo_gym_prorl.sandbox.supervisor.rpc.protocol import Message, PeerGone, close_all
from nemo_gym_prorl.sandbox.supervisor.sandbox import Sandbox, Stage
from nemo_gym_prorl.sandbox.supervisor.storage import state_dir
from nemo_gym_prorl.sandbox.supervisor.storage.erase import remove_tree


AT_ONCE = 2 * (os.cpu_count() or 1)
"""Sandboxes that are created at a time: more would only slow each other, and whoever waits for a command. Beyond them
as many again may be, each the only one of its image."""


class Creation:
    """Creates the sandboxes of one supervisor.

    Args:
        folder: the supervisor's.
        loop: its loop.
        children: its children.
        groups: where control groups are made, if they can be.
        launcher: what starts first processes.
        held: the moulds of all sandboxes that are not gone yet.
        up: told of each that is up, with the variables that its image sets.
        failed: told of each that can't be created, and why.
        ended: told when our child for one that is not being created any more has ended, and with which status;
            ``None`` if it never began.
    """

    def __init__(
        self,
        folder: Path,
        loop: Loop,
        children: Children,
        groups: Path | None,
        launcher: Launcher,
        *,
        held: Callable[[], Iterable[Mould | None]],
        up: Callable[[Sandbox, dict[str, str]], None],
        failed: Callable[[Sandbox, Message], None],
        ended: Callable[[Sandbox, int | None], None],
    ) -> None:
        self._loop = loop
        self._children = children
        self._groups = groups
        self._launcher = launcher
        self._up = up
        self._failed = failed
        self._ended = ended
        self._waiting: deque[Sandbox] = deque()
        self._creating: set[Sandbox] = set()
        self._beginning = False
        self._moulds = Moulds(folder, children, held)

    def begin(self, sandbox: Sandbox) -> None:
        """Create one when it is its turn."""
        self._waiting.append(sandbox)
        self._next()

    def leave(self, sandbox: Sandbox) -> None:
        """One is up, or will never be: others have their turn."""
        if sandbox in self._creating:
            self._creating.discard(sandbox)
            self._next()

    def _next(self) -> None:
        if self._beginning:
            # One that fails at once makes room for the next, which is begun here and not deeper and deeper down.
            return
        self._beginning = True
        while sandbox := self._whose_turn():
            if sandbox.stage is Stage.WAITING:
                sandbox.stage = Stage.CREATING
                self._creating.add(sandbox)
                self._attempt(sandbox, partial(self._first_attempt, sandbox))
        self._beginning = False

    def _whose_turn(self) -> Sandbox | None:
        begun = [sandbox.order["image"] for sandbox in self._creating]
        late = begun if len(begun) >= AT_ONCE else []
        found = next((sandbox for sandbox in self._waiting if sandbox.order["image"] not in late), None)
        if found is None or len(begun) >= 2 * AT_ONCE:
            return None
        self._waiting.remove(found)
        return found

    def _took_long(self, sandbox: Sandbox) -> None:
        if sandbox.stage is Stage.CREATING:
            self._failed(sandbox, {"error": f"the sandbox was not up within {sandbox.order['start_timeout_s']:g} s"})

    def _attempt(self, sandbox: Sandbox, step: Callable[[], None]) -> None:
        """Do something for a sandbox that has to end if it can't be done."""
        try:
            step()
        except OSError as error:
            self._failed(sandbox, {"error": f"it can't be prepared: {in_words(error)}"})
        except Exception as error:
            self._failed(sandbox, {"error": f"its order is wrong: {type(error).__name__}: {error}"})

    def _first_attempt(self, sandbox: Sandbox) -> None:
        order = sandbox.order
        self._loop.call_in(order["start_timeout_s"], partial(self._took_long, sandbox))
        sandbox.folder.mkdir(mode=0o700)
        _own(sandbox.folder, order)
        if self._groups:
            path = self._groups / cgroups.name_of(sandbox.folder)
            state_dir.note_group(sandbox.folder, path)
            sandbox.group = cgroups.Group.make(path)
        broken = self._moulds.broken(order)
        if order["start"] == "runtime" or (broken and order["start"] == "auto"):
            sandbox.fallback = broken
            self._by_runtime(sandbox)
        else:
            self._by_mould(sandbox)

    def _lay_out(self, sandbox: Sandbox) -> None:
        """Make what is on disk of it."""
        overlay = sandbox.folder / "overlay"
        for path in (overlay, overlay / "upper", overlay / "work", sandbox.folder / "shared"):
            path.mkdir(mode=0o700)
            _own(path, sandbox.order)
        (overlay / "upper").chmod(0o755)

    def _open_channel(self, sandbox: Sandbox) -> socket.socket:
        """Make its channel, in place of one that there may be; returns the first process's end."""
        if sandbox.channel:
            self._loop.drop(sandbox.channel)
        kind = socket.SOCK_STREAM if sandbox.way == "runtime" else socket.SOCK_SEQPACKET
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        sandbox.channel = ours
        ours.setblocking(False)
        heard = self._keeper_spoke if sandbox.way == "runtime" else self._first_process_spoke
        self._loop.watch(ours, partial(heard, sandbox))
        return theirs

    # By the container runtime

    def _by_runtime(self, sandbox: Sandbox) -> None:
        sandbox.way, sandbox.mould = "runtime", None
        self._lay_out(sandbox)
        with self._open_channel(sandbox) as channel:
            sandbox.log = logs.create()
            try:
                command = runtime_command(sandbox.order, sandbox.folder)
                program = partial(become_runtime, sandbox.order, command, sandbox.folder, channel, sandbox.log)
                started = self._children.start(program, partial(self._starter_ended, sandbox), sandbox.group)
            except OSError:
                sandbox.take_log()
                raise
        sandbox.starter = started[0]
        state_dir.note_starter(sandbox.folder, sandbox.starter)
        self.look_for_first(sandbox)

    def look_for_first(self, sandbox: Sandbox) -> None:
        """Note its namespace down as soon as the runtime has made it: what the image runs may never say a word."""
        if sandbox.way != "runtime" or sandbox.starter is None or sandbox.space:
            return
        if space := state_dir.Space.below(sandbox.starter):
            sandbox.space = space
            space.note(sandbox.folder)
        elif sandbox.stage is Stage.CREATING:
            self._loop.call_in(state_dir.LOOK_S, partial(self.look_for_first, sandbox))

    def _keeper_spoke(self, sandbox: Sandbox) -> None:
        assert sandbox.channel
        self._loop.ignore(sandbox.channel)
        said = sandbox.channel.recv(64)
        self.look_for_first(sandbox)
        if not said or sandbox.space is None:
            # The starter's end says why.
            return
        self._attempt(sandbox, partial(self._note, sandbox, sandbox.space.init))
        if sandbox.stage is not Stage.CREATING or sandbox.place is None:
            return
        self._children.fork(partial(_prepare, sandbox.place, sandbox.order), partial(self._prepared, sandbox))

    def _note(self, sandbox: Sandbox, pid: int) -> None:
        """Its first process is known."""
        limits = {int(key): value for key, value in sandbox.order["limits"].items()} | kernel_shares.limits()
        space = state_dir.Space.of(pid)
        if space.number == os.stat("/proc/self/ns/pid").st_ino:
            raise OSError(f"process {pid} is none of a sandbox's")
        sandbox.space = space
        space.note(sandbox.folder)
        spaces = joining.spaces_of(pid)
        added = frozenset(sandbox.order["capabilities"])
        rooted = sandbox.way == "mould"
        sandbox.place = joining.Place(pid, sandbox.order["uid"], limits, spaces, rooted=rooted, capabilities=added)

    def _prepared(self, sandbox: Sandbox, answer: Message, _files: list[int]) -> None:
        if sandbox.stage is not Stage.CREATING:
            return
        if trouble := answer.get("error") or sandbox.bound():
            self._failed(sandbox, {"error": f"it can't be set up: {trouble}"})
            return
        sandbox.take_log()
        sandbox.environment = answer.get("environment", sandbox.environment)
        if sandbox.fallback:
            # With the runtime it works: the mould need not be tried for each.
            self._moulds.mark_broken(sandbox.order, sandbox.fallback)
        self._up(sandbox, sandbox.environment)
        self.leave(sandbox)

    def _starter_ended(self, sandbox: Sandbox, status: int) -> None:
        sandbox.starter = None
        log = sandbox.take_log()
        if sandbox.stage is not Stage.CREATING:
            self._ended(sandbox, status)
            return
        code = os.waitstatus_to_exitcode(status)
        if sandbox.way == "mould":
            # Whoever kills it says nothing about the mould, from which others are made.
            answer = {"error": f"its first process ended with {code}"}
            self._fall_back(sandbox, answer, by_mould=code != -signal.SIGKILL)
        else:
            self._failed(sandbox, {"error": f"the runtime ended with {code}", "log": log})

    # From the mould

    def _by_mould(self, sandbox: Sandbox) -> None:
        sandbox.way = "mould"
        self._lay_out(sandbox)

        def then(mould: Mould | None, answer: Message) -> None:
            self._attempt(sandbox, partial(self._with_mould, sandbox, mould, answer))

        self._moulds.get(sandbox.order, then)

    def _with_mould(self, sandbox: Sandbox, mould: Mould | None, answer: Message) -> None:
        """Its mould has just been made or was there already."""
        if sandbox.stage is not Stage.CREATING:
            return
        if mould is None:
            self._fall_back(sandbox, answer)
            return
        sandbox.environment, sandbox.mould = mould.environment, mould
        action = preliminaries(mould, sandbox.order)
        if action is None:
            self._cast(sandbox, mould, {"owners": False}, [])
        else:

            def done(answer: Message, files: list[int]) -> None:
                self._attempt(sandbox, partial(self._cast, sandbox, mould, answer, files))

            self._children.fork(action, done)

    def _cast(self, sandbox: Sandbox, mould: Mould, answer: Message, files: list[int]) -> None:
        owners = [files.pop(0)] if answer.get("owners") else []
        try:
            if sandbox.stage is not Stage.CREATING:
                return
            if "error" in answer:
                self._fall_back(sandbox, answer)
                return
            self._carry_out(sandbox, mould, owners, files)
            owners, files = [], []
        finally:
            close_all(owners)
            close_all(files)

    def _carry_out(
        self, sandbox: Sandbox, mould: Mould, owners: list[int], files: list[int], tries: int = TRIES
    ) -> None:
        """Have its first process started; ``owners`` and ``files`` are closed after that."""

        def give_up(error: str) -> None:
            sandbox.casting = False
            close_all(owners)
            close_all(files)
            if sandbox.stage is Stage.CREATING:
                self._fall_back(sandbox, {"error": error})
            else:
                self._ended(sandbox, None)

        def done(answer: Message, _files: list[int]) -> None:
            close_all(files)
            self._has_first(sandbox, mould, answer, owners)

        def lost() -> None:
            # Of what the launcher may have begun nothing goes on: this channel of the sandbox's is closed.
            if tries > 1 and sandbox.stage is Stage.CREATING:
                self._carry_out(sandbox, mould, owners, files, tries - 1)
            else:
                give_up("the supervisor's launcher was killed")

        try:
            request = cast(mould, sandbox.order, str(sandbox.folder))
            with self._open_channel(sandbox) as channel:
                sandbox.casting, sandbox.ready = True, False
                domain, *volumes = files if sandbox.order["users"] else [mould.domain, *files]
                given = [domain, channel.fileno(), self._launcher.program(), *volumes]
                self._launcher.run(request, given, sandbox.group, done, lost)
        except OSError as error:
            give_up(in_words(error))

    def _has_first(self, sandbox: Sandbox, mould: Mould, answer: Message, owners: list[int]) -> None:
        """The first process is there, and waits for the image."""
        sandbox.casting = False
        try:
            if "error" in answer:
                if sandbox.stage is Stage.CREATING:
                    self._fall_back(sandbox, answer)
                else:
                    self._ended(sandbox, None)
                return
            pid = sandbox.starter = answer["pid"]
            self._children.adopt(pid, partial(self._starter_ended, sandbox))
            if sandbox.starter != pid:
                # It has ended already.
                return
            if sandbox.stage is Stage.CREATING:
                self._hand_over(sandbox, mould, pid, owners)
            else:
                os.kill(pid, signal.SIGKILL)
        except Exception as error:
            self._fall_back(sandbox, failure(error))
        finally:
            close_all(owners)

    def _hand_over(self, sandbox: Sandbox, mould: Mould, pid: int, owners: list[int]) -> None:
        assert sandbox.channel
        self._note(sandbox, pid)
        image = image_for(mould, pid, owners[0] if owners else None)
        try:
            socket.send_fds(sandbox.channel, [b"go"], [] if image is None else [image])
        finally:
            if image is not None:
                os.close(image)

    def _first_process_spoke(self, sandbox: Sandbox) -> None:
        """It is up once its channel is closed, if nothing but the word was said."""
        assert sandbox.channel
        try:
            answer, _files = requests.receive(sandbox.channel)
        except BlockingIOError:
            return
        except PeerGone:
            self._loop.ignore(sandbox.channel)
            if sandbox.ready:
                self._prepared(sandbox, {}, [])
            return
        sandbox.ready = "ready" in answer
        if not sandbox.ready:
            self._loop.ignore(sandbox.channel)
            self._fall_back(sandbox, {"error": "it can't be made", "log": answer["error"]})

    def _fall_back(self, sandbox: Sandbox, answer: Message, *, by_mould: bool = True) -> None:
        """Let the runtime try, if the order leaves it open and nothing of the try with the mould is left.

        Args:
            sandbox: the one that is being created.
            answer: what went wrong.
            by_mould: whether it was the mould's doing, and would be with others of the image.
        """
        if sandbox.stage is not Stage.CREATING:
            return
        if sandbox.order["start"] != "auto":
            self._failed(sandbox, answer)
            return
        if by_mould:
            sandbox.fallback = sandbox.fallback or str(answer.get("log") or answer["error"])
        if sandbox.starter is not None:
            # Its end brings us back here.
            os.kill(sandbox.starter, signal.SIGKILL)
            return
        sandbox.place = sandbox.space = None
        self._attempt(sandbox, partial(self._again, sandbox))

    def _again(self, sandbox: Sandbox) -> None:
        (sandbox.folder / state_dir.SPACE_FILE).unlink(missing_ok=True)
        for entry in sandbox.folder.iterdir():
            if entry.is_dir():
                remove_tree(entry)
        self._by_runtime(sandbox)


def _own(path: Path, order: Message) -> None:
    if os.geteuid() == 0:
        os.chown(path, order["host_uid"], order["host_gid"])


def _prepare(place: joining.Place, order: Message) -> tuple[Message, list[int]]:
    """In a child forked for it, since it depends on what the image has for a shell."""
    signal.setitimer(signal.ITIMER_REAL, order["start_timeout_s"])
    environment = image_environment.read(place.pid)
    joining.prepare(place, order["shared_memory_mib"], order["network"], order["image"])
    return {"environment": environment}, []
