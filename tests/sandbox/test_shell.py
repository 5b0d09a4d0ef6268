# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""A persistent bash in a real container: as bash is at a terminal, in its files, its special variables, its options,
its exit codes; and input, time limits, interrupts and hostile commands.

The shells of a way of starting share a sandbox, which takes longer to start than most of these tests.
"""

from __future__ import annotations

import asyncio
import os
import termios
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from nemo_gym_prorl.failures import CallerError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.isolation.user_ids import multi_user_error
from nemo_gym_prorl.sandbox.runtime.apptainer import Runtime
from nemo_gym_prorl.sandbox.sessions.shell import Shell
from nemo_gym_prorl.sandbox.spec import Start
from nemo_gym_prorl.sandbox.supervisor.protocol import SandboxBroken, SandboxLost


pytestmark = [pytest.mark.sandbox, pytest.mark.usefixtures("way"), pytest.mark.asyncio(loop_scope="module")]

LONG = bool(os.environ.get("PRORL_TEST_LONG"))
ROUNDS = 10 if LONG else 3
"""Repetitions of each race."""


@pytest.fixture(scope="module", params=["direct", "runtime"])
def way(request: pytest.FixtureRequest) -> Start:
    chosen: Start = request.param
    return chosen


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def container(image: Path, runtime: Runtime, way: Start) -> AsyncIterator[Container]:
    async with await Container.start(ContainerSpec(image=image, start=way), runtime) as live:
        yield live


@pytest_asyncio.fixture(loop_scope="module")
async def shell(container: Container) -> AsyncIterator[Shell]:
    async with await Shell.start(container) as live:
        yield live


COMMANDS = {
    # Commands of one shell, what each prints, and its exit code.
    "state": [
        ("mkdir -p '/tmp/a b' && cd '/tmp/a b'; export X=1; f() { echo f$X; }; alias hi='echo ho'", "", 0),
        ("pwd; f; hi; (exit 42)", "/tmp/a b\nf1\nho\n", 42),
        ("echo $?; compgen -A function", "42\nf\n", 0),
    ],
    "lines and heredocs": [
        ("cat <<'X' | tr a-z A-Z\nit's\n\"so\"\nX\nfor i in 1 2; do\n  echo $i\ndone", 'IT\'S\n"SO"\n1\n2\n', 0),
        ("echo fine # no newline at the end", "fine\n", 0),
    ],
    "a terminal": [("tty | tr -d 0-9; tty <&2 | tr -d 0-9", "/dev/pts/\n/dev/pts/\n", 0)],
    "bytes that are no text": [(r"printf '\xff\xfeok\x00\x1b[31m'", "\ufffd\ufffdok\0\x1b[31m", 0)],
    "redirections of the shell itself": [
        ("exec >/tmp/log; echo into the file; PS1='prompt> '; PS2='more> '", "", 0),
        ("exec >/dev/tty; cat /tmp/log", "into the file\n", 0),
    ],
    "set -e": [("set -e", "", 0), ("if false; then :; fi; ! true || echo ok", "ok\n", 0), ("(exit 3) || true", "", 0)],
    "set -e after a failure": [("false", "", 1), ("echo $?; set -e", "1\n", 0), ("echo on", "on\n", 0)],
    "a trap of failures": [
        ("trap 'echo E$?' ERR", "", 0),
        ("false", "E1\n", 1),
        ("true", "", 0),
        ("(exit 4)", "E4\n", 4),
        ("if false; then :; fi; ! true", "", 1),
        ("f() { return 5; }; f", "E5\n", 5),
    ],
    "a trace": [
        ("set -x; : a; false", "++ : a\n++ false\n", 1),
        ("set +x; echo ${PIPESTATUS[@]} $?", "++ set +x\n0 0\n", 0),
    ],
}


@pytest.mark.parametrize("what", COMMANDS)
async def test_a_shell_runs_and_traps_the_agents_commands_alone(what: str, shell: Shell) -> None:
    for command, output, code in COMMANDS[what]:
        done = await shell.run(command)
        assert (command, done.output, done.exit_code) == (command, output, code)


KEPT = {
    # A command, the next command, and the last line of its output.
    "a pipeline": ("false | true | (exit 3)", "echo ${PIPESTATUS[@]} $?", "1 0 3 3"),
    "an inverted failure": ("! false", "echo $? ${PIPESTATUS[@]}", "0 1"),
    "with pipefail": ("set -o pipefail; false | true", "echo $? ${PIPESTATUS[@]}; set +o pipefail", "1 1 0"),
    "a signal": ("sh -c 'kill -9 $$' | true", "echo ${PIPESTATUS[@]}", "137 0"),
    "the last word": ("echo a b >/dev/null", "echo $_", "b"),
    "a made folder": ("mkdir -p '/tmp/a b'", 'cd "$_" && pwd', "/tmp/a b"),
    "the last word of a pipeline": (": a; echo x | cat >/dev/null", "echo $_", "a"),
    "an exit status": ("(exit 42)", "echo $?", "42"),
}


@pytest.mark.parametrize("what", KEPT)
async def test_what_a_command_leaves_the_next_one_finds(what: str, shell: Shell) -> None:
    command, following, expected = KEPT[what]
    await shell.run(command)
    assert (await shell.run(following)).output.splitlines()[-1:] == [expected]


UNFINISHED = {
    # A command, a part of bash's output, and its exit code.
    "a heredoc": ("cat <<X\nno end", "no end\n", 0),
    "a line that goes on": ("echo a \\", "a \\\n", 0),
    "a quote": ("echo 'a", "unexpected EOF", 1),
    "a pipeline": ("true |", "unexpected end of file", 1),
}


@pytest.mark.parametrize("what", UNFINISHED)
async def test_what_is_unfinished_is_not_continued_by_us(what: str, shell: Shell) -> None:
    command, said, code = UNFINISHED[what]
    done = await shell.run(command)
    assert said in done.output
    assert "_prorl" not in done.output
    assert bool(done.exit_code) == bool(code)
    assert (await shell.run("echo on; declare -F")).output == "on\n"


async def test_background_jobs_run_on_and_speak_later(container: Container, shell: Shell) -> None:
    first = await shell.run("(until [ -e /tmp/go ]; do sleep 0.02; done; echo late) &")
    assert first.exit_code == 0
    assert "late\n" in (await shell.run("touch /tmp/go; wait; jobs")).output
    await shell.run("(until [ ! -e /tmp/go ]; do sleep 0.02; done; echo between; touch /tmp/said) &")
    await container.run("rm /tmp/go; until [ -e /tmp/said ]; do sleep 0.02; done", timeout_s=60)
    assert (await shell.run("echo now", output_limit=1000)).output == "between\nnow\n"


async def test_programs_can_ask_for_input(shell: Shell) -> None:
    asked = await shell.run("printf 'name? '; read name; echo hello $name", silence_s=0.2)
    assert asked.waiting
    assert (asked.output, asked.exit_code) == ("name? ", None)
    with pytest.raises(CallerError, match="still runs"):
        await shell.run("true")
    await shell.send("world\n")
    answered = await shell.wait()
    assert (answered.output, answered.exit_code) == ("name? hello world\n", 0)


async def test_ctrl_c_ends_the_command_and_nothing_else(shell: Shell) -> None:
    await shell.run("export KEPT=1")
    running = asyncio.create_task(shell.run("sleep 100; echo not reached"))
    await asyncio.sleep(0.2)
    await shell.interrupt()
    interrupted = await running
    assert interrupted.exit_code == 130
    assert "not reached" not in interrupted.output
    assert (await shell.run("echo $KEPT")).output == "1\n"


@pytest.mark.parametrize(
    "command",
    [
        *("sleep 1000", "trap '' INT; sleep 1000", "cat", "yes"),
        "sh -c 'trap \"\" INT; sleep 100'; sleep 100; sleep 100",
        "(while :; do ls >/dev/null; done); sleep 100; sleep 100",
        "true | sh -c 'trap \"\" INT; sleep 100'",
    ],
)
async def test_the_hard_limit_gives_what_there_is_and_a_usable_shell(shell: Shell, command: str) -> None:
    stopped = await shell.run(f"echo begun; {command}", timeout_s=1, silence_s=None)
    assert stopped.timed_out
    assert stopped.output.startswith("begun\n")
    assert not stopped.exited
    assert (await shell.run("echo usable")).output.endswith("usable\n")


GROWING = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.005)
"""


async def test_at_the_hard_limit_a_fork_bomb_is_killed_as_a_whole(image: Path, runtime: Runtime, way: Start) -> None:
    spec = ContainerSpec(image=image, start=way, processes=64)
    async with await Container.start(spec, runtime) as full, await Shell.start(full) as shell:
        stopped = await shell.run(f"python3 -c '{GROWING}'", timeout_s=1, silence_s=None)
        assert (stopped.timed_out, stopped.exited) == (True, False)
        assert (await shell.run("echo usable; ls / | wc -l")).output.startswith("usable\n")


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("exec true", 0), ("set -e; false", 1)])
async def test_an_end_of_the_shell_is_reported(shell: Shell, command: str, code: int) -> None:
    ended = await shell.run(command)
    assert ended.exited
    assert ended.exit_code == code
    with pytest.raises(SandboxBroken, match="restart"):
        await shell.run("true")
    await shell.restart()
    assert (await shell.run("echo again")).output == "again\n"


async def test_a_shell_that_was_killed_may_have_been_so_by_the_machine(shell: Shell) -> None:
    ended = await shell.run("kill -9 $$")
    assert (ended.exited, ended.exit_code) == (True, 128 + 9)
    with pytest.raises(SandboxLost, match="restart"):
        await shell.run("true")
    await shell.restart()
    await shell.run("trap '' INT; kill() { :; }; while :; do :; done", timeout_s=0.5, silence_s=None)
    assert shell.exited
    with pytest.raises(SandboxBroken, match="restart"):
        await shell.run("true")


async def test_output_keeps_head_and_tail(shell: Shell) -> None:
    flood = await shell.run("echo first; yes 0123456789 | head -c 20000000; echo; echo last", output_limit=10_000)
    assert flood.output.startswith("first\n")
    assert flood.output.endswith("last\n")
    assert f"[... {flood.omitted} bytes omitted ...]" in flood.output
    assert flood.omitted == 20_000_000 + 12 - 10_000
    assert len(flood.output) < 11_000


async def test_the_folder_is_the_one_that_bash_is_in(shell: Shell) -> None:
    assert (await shell.run("mkdir -p '/tmp/real (deleted)'; cd '/tmp/real (deleted)'")).cwd == "/tmp/real (deleted)"
    assert (await shell.run("rmdir '/tmp/real (deleted)'")).cwd == "/tmp/real (deleted)"
    assert (await shell.run("mkdir /tmp/a; ln -s /tmp/a /tmp/link; cd /tmp/link; PWD=/false")).cwd == "/tmp/a"


@pytest.mark.parametrize("thrown", ["kill -INT $$", "echo $((1 / 0))", "set -u; echo $none", "readonly R; R=1"])
async def test_what_throws_a_command_away_ends_it_at_once(shell: Shell, thrown: str) -> None:
    for prompt in ("PS1='(venv) '$PS1", "PS1='> '"):
        done = await shell.run(f"{prompt}; echo before; {thrown}; echo after", timeout_s=20)
        assert not done.timed_out
        assert done.exit_code != 0
        assert done.output.startswith("before\n")
        assert "after" not in done.output
    assert (await shell.run("set +u; echo on")).output == "on\n"


async def test_all_of_the_output_is_there_at_the_end(shell: Shell) -> None:
    for size in (1, 4095, 4096, 65_536, 300_001):
        assert len((await shell.run(f"head -c {size} /dev/zero | tr '\\0' x", output_limit=1 << 20)).output) == size


async def test_an_end_of_file_can_be_typed_and_the_window_changed(shell: Shell) -> None:
    await shell.run("cat; stty size", silence_s=0.1)
    termios.tcsetwinsize(shell.terminal.fd, (11, 22))
    await shell.send("\x04")
    assert (await shell.wait()).output == "11 22\n"


@pytest.mark.parametrize(
    "hook", ["PROMPT_COMMAND='sleep 1'", "trap '[[ -e /tmp/once ]] || { > /tmp/once; sleep 1; }' DEBUG"]
)
async def test_a_bash_that_takes_its_time_gets_its_commands(shell: Shell, hook: str) -> None:
    await shell.run(hook)
    for size in (0, 300_000):
        done = await shell.run(f"rm -f /tmp/once; echo mine; : {'x' * size}", silence_s=None)
        assert (done.exit_code, done.output) == (0, "mine\n")


@pytest.mark.parametrize("size", [0, 60_000, 300_000])
async def test_an_interrupt_does_not_run_what_a_command_says(container: Container, shell: Shell, size: int) -> None:
    """Bash forgets what it has read of a line, and would go on with the rest, a file's text, as with commands. And one
    that has just started a program comes back to its prompt, and waits for the program with its next command."""
    for pause_s in (0, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008) * (1 if size else ROUNDS):
        text = "touch /tmp/executed\n" * (1 + size // 20)
        running = asyncio.create_task(shell.run(f"cat >/tmp/x <<'E'\n{text}E\nsleep 100", timeout_s=1, silence_s=None))
        await asyncio.sleep(pause_s)
        while not running.done():
            # Between two programs the key has no effect, so it is pressed again.
            await shell.interrupt()
            await asyncio.wait([running], timeout=0.2)
        done = await running
        # Pressed during a fork, the key may miss the program; then the time limit ends it.
        assert done.timed_out or (done.exit_code, done.exited) == (130, False)
        if done.exited:
            await shell.restart()
        assert (await shell.run("echo mine; (exit 44)")).exit_code == 44
    assert (await container.run("ls /tmp/executed")).exit_code != 0


async def test_an_interrupt_as_a_command_ends_is_none_of_the_next(shell: Shell) -> None:
    """A late interrupt must not discard the next command."""
    loop, patience = asyncio.get_running_loop(), 0.012
    for attempt in range(20 * ROUNDS):
        running = asyncio.create_task(shell.run("sleep 0.01", timeout_s=10, silence_s=None))
        press_at = loop.time() + patience
        while loop.time() < press_at:
            await asyncio.sleep(0)
        await shell.interrupt()
        code = (await running).exit_code
        assert code in (0, 130)
        patience += 0.0003 if code else -0.0003  # so each is pressed about when its command ends
        after = await shell.run(f"echo next {attempt}; (exit 44)", timeout_s=10)
        assert (after.output[-len(f"next {attempt}\n") :], after.exit_code) == (f"next {attempt}\n", 44)


async def test_what_has_not_begun_in_its_time_never_does(container: Container, shell: Shell) -> None:
    await shell.run("PROMPT_COMMAND='sleep 1.5'")
    stopped = await shell.run("touch /tmp/begun", timeout_s=0.2, silence_s=None)
    assert (stopped.timed_out, stopped.exited) == (True, True)
    await asyncio.sleep(1.5)
    assert (await container.run("ls /tmp/begun")).exit_code != 0


async def test_a_nul_is_refused(shell: Shell) -> None:
    with pytest.raises(CallerError, match="command"):
        await shell.run("echo \0")


HOSTILE = [
    "builtin() { :; }; printf() { :; }; command() { :; }; cd() { :; }",
    "exec </dev/null",
    'for i in {0..255}; do eval "exec $i>&-"; done',
    "trap 'echo trapped' DEBUG ERR RETURN EXIT; set -xv",
    "PROMPT_COMMAND='read -r line; echo $line >>/tmp/stolen'",
    "unset PS1 PS2 PS4 BASH_ENV HOME PATH; enable -n exec; set -o nounset",
    "ulimit -n 12",
    "stty raw -echo; stty intr undef",
    "kill -STOP $$",
    "alias eval=: printf=: builtin=:; enable -n printf eval builtin",
    "printf '\\036'; cat /dev/urandom | head -c 100000; tput reset; printf '\\033[6n\\0'",
]


async def test_whatever_a_command_does_to_its_shell_the_next_one_is_told_the_truth(container: Container) -> None:
    """The shell keeps working, or reports its end and can be restarted."""

    async def attack(command: str) -> None:
        async with await Shell.start(container) as shell:
            done = await shell.run(command, timeout_s=0.5, silence_s=None)
            for _ in range(2):
                if done.exited:
                    await shell.restart()
                try:
                    done = await shell.run('echo "a$((40 + 2))b"; (exit 3)', timeout_s=3, silence_s=None)
                except (SandboxBroken, SandboxLost):
                    # Bash ended after it had reported the last command's end.
                    await shell.restart()
                    continue
                # A bash without ``eval`` reports that.
                honest = ("a42b" in done.output and done.exit_code == 3) or "eval: command not found" in done.output
                assert done.exited or honest, (command, done)
            await shell.restart()
            fresh = await shell.run("echo fresh; cat", timeout_s=0.7, silence_s=None)
            assert fresh.output.startswith("fresh\n"), (command, fresh)

    await asyncio.gather(*(attack(command) for command in HOSTILE))


@pytest.mark.skipif(bool(multi_user_error()), reason="this user has no range of ids")
async def test_a_shell_changes_its_user_and_comes_back(image: Path, runtime: Runtime) -> None:
    async with (
        await Container.start(ContainerSpec(image=image, users=True), runtime) as machine,
        await Shell.start(machine) as shell,
    ):
        made = await shell.run("useradd -m -s /bin/bash alice && echo alice:word | chpasswd")
        assert made.exit_code == 0, made
        assert (await shell.run("su - alice", silence_s=0.5)).waiting
        await shell.send("whoami; touch own; exit 3\n")
        back = await shell.wait()
        assert (back.exit_code, "alice" in back.output) == (3, True), back
        assert (await shell.run("whoami; stat -c %U ~alice/own")).output == "root\nalice\n"
