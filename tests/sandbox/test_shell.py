# SPDX-License-Identifier: Apache-2.0
"""A persistent bash in a real container: state, exit codes, input, time limits, floods, and hostile commands."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_gym_prorl.failures import CallerError, InfrastructureError
from nemo_gym_prorl.sandbox.container import Container, ContainerSpec
from nemo_gym_prorl.sandbox.link import SandboxLost
from nemo_gym_prorl.sandbox.runtime import Runtime
from nemo_gym_prorl.sandbox.shell import Shell, ShellBusy


pytestmark = pytest.mark.sandbox


async def test_state_lives_from_one_command_to_the_next(shell: Shell) -> None:
    moved = await shell.run("mkdir -p '/tmp/a b' && cd '/tmp/a b'; export X=1; f() { echo f$X; }; alias hi='echo ho'")
    assert (moved.exit_code, moved.output, moved.cwd) == (0, "", "/tmp/a b")
    assert (await shell.run("pwd; f; hi")).output == "/tmp/a b\nf1\nho\n"
    assert (await shell.run("(exit 42)")).exit_code == 42
    assert (await shell.run("echo $?")).output == "42\n"


async def test_lines_heredocs_and_quotes(shell: Shell) -> None:
    assert (await shell.run("cat <<'X' | tr a-z A-Z\nit's\n\"so\"\nX\nfor i in 1 2; do\n  echo $i\ndone")).output == (
        'IT\'S\n"SO"\n1\n2\n'
    )
    broken = await shell.run("echo 'never closed")
    assert broken.exit_code != 0
    assert "unexpected EOF" in broken.output
    assert (await shell.run("if true; then")).exit_code != 0
    assert (await shell.run("cat <<X\nno end")).output.endswith("no end\n")
    assert (await shell.run("echo fine # no newline at the end")).output == "fine\n"


async def test_a_long_command_arrives_whole(shell: Shell) -> None:
    text = "0123456789" * 20_000
    assert (await shell.run(f"printf %s '{text}' | wc -c")).output.strip() == "200000"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs", "Cc"]), max_size=80))
async def test_any_text_comes_back_as_it_was_sent(image: Path, runtime: Runtime, text: str) -> None:
    global _echo
    loop = asyncio.get_running_loop()
    if _echo is None or _echo[0] is not loop:
        container = await Container.start(ContainerSpec(image=image), runtime)
        _echo = loop, await Shell.start(container), container
    try:
        quoted = text.replace("'", "'\\''")
        assert (await _echo[1].run(f"printf %s '{quoted}'")).output == text
    finally:
        await _echo[2].close()
        _echo = None


_echo: tuple[asyncio.AbstractEventLoop, Shell, Container] | None = None


async def test_background_jobs_run_on_and_speak_later(shell: Shell) -> None:
    begin = time.monotonic()
    first = await shell.run("(sleep 0.3; echo late) &")
    assert time.monotonic() - begin < 0.3
    assert first.exit_code == 0
    assert "late\n" in (await shell.run("wait; jobs")).output
    await shell.run("(sleep 0.1; echo between) &")
    await asyncio.sleep(0.5)
    assert (await shell.run("echo now", output_limit=1000)).output == "between\nnow\n"


async def test_programs_can_ask_for_input(shell: Shell) -> None:
    asked = await shell.run("printf 'name? '; read name; echo hello $name", silence_s=0.2)
    assert asked.waiting
    assert (asked.output, asked.exit_code) == ("name? ", None)
    with pytest.raises(ShellBusy):
        await shell.run("true")
    await shell.send("world\n")
    answered = await shell.wait()
    assert (answered.output, answered.exit_code) == ("name? hello world\n", 0)


async def test_input_is_not_taken_for_commands(shell: Shell) -> None:
    await shell.run("cat > /tmp/typed", silence_s=0.1)
    await shell.send("exit 3\n\x04")
    assert (await shell.wait()).exit_code == 0
    assert (await shell.run("cat /tmp/typed")).output == "exit 3\n"


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
    ["sleep 1000", "while :; do :; done", "trap '' INT; sleep 1000", "python3 -c 'while True: pass'", "cat", "yes"],
)
async def test_the_hard_limit_gives_what_there_is_and_a_usable_shell(shell: Shell, command: str) -> None:
    stopped = await shell.run(f"echo begun; {command}", timeout_s=0.5, silence_s=None)
    assert stopped.timed_out
    assert stopped.output.startswith("begun\n")
    assert not stopped.exited
    assert (await shell.run("echo usable")).output.endswith("usable\n")


async def test_bash_that_cannot_be_interrupted_is_ended_and_said_to_be(shell: Shell) -> None:
    stopped = await shell.run("trap '' INT; while :; do :; done", timeout_s=0.3, silence_s=None)
    assert stopped.timed_out
    assert stopped.exited
    await shell.restart()
    assert (await shell.run("echo new")).output == "new\n"


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("exec true", 0), ("set -e; false", 1)])
async def test_an_end_of_the_shell_is_reported(shell: Shell, command: str, code: int) -> None:
    ended = await shell.run(command)
    assert ended.exited
    assert ended.exit_code == code
    with pytest.raises(SandboxLost, match="restart"):
        await shell.run("true")
    await shell.restart()
    assert (await shell.run("echo again")).output == "again\n"


async def test_output_keeps_head_and_tail(shell: Shell) -> None:
    flood = await shell.run("echo first; yes 0123456789 | head -c 20000000; echo; echo last", output_limit=10_000)
    assert flood.output.startswith("first\n")
    assert flood.output.endswith("last\n")
    assert f"[... {flood.omitted} bytes omitted ...]" in flood.output
    assert flood.omitted == 20_000_000 + 12 - 10_000
    assert len(flood.output) < 11_000


async def test_bytes_that_are_not_text(shell: Shell) -> None:
    assert (await shell.run(r"printf '\xff\xfeok\x00\x1b[31m'")).output == "\ufffd\ufffdok\0\x1b[31m"


async def test_a_command_cannot_forge_its_end(shell: Shell) -> None:
    forged = "\\036" + "0" * 32 + " 0 /\\0"
    honest = await shell.run(f"printf '{forged}'; printf '{forged}' >/dev/tty; sleep 0.1; echo after; false")
    assert honest.exit_code == 1
    assert honest.output.endswith("after\n")
    snooping = await shell.run(
        "cat /proc/$$/cmdline /proc/$$/environ | tr '\\0' ' '; ls -l /proc/self/fd | wc -l; false"
    )
    assert snooping.exit_code == 1
    stolen = await shell.run("timeout 0.2 cat <&3; timeout 0.2 cat /proc/$$/fd/0 </dev/null; echo done", timeout_s=5)
    assert stolen.output.endswith("done\n")
    assert (await shell.run("echo in step")).output == "in step\n"


async def test_redirections_of_the_shell_itself_hide_no_end(shell: Shell) -> None:
    assert (await shell.run("exec >/tmp/log; echo into the file; PS1='prompt> '; PS2='more> '")).exit_code == 0
    back = await shell.run("exec >/dev/tty; cat /tmp/log")
    assert back.output == "into the file\n"


async def test_a_nul_is_refused(shell: Shell) -> None:
    with pytest.raises(CallerError, match="command"):
        await shell.run("echo \0")


async def test_no_bash_is_said_at_once(container: Container) -> None:
    await container.run("rm -f /bin/bash /usr/bin/bash")
    with pytest.raises(InfrastructureError, match="bash"):
        await Shell.start(container)


async def test_many_shells_wait_at_once(container: Container) -> None:
    """Each waits for all others, so they end only if none holds up another."""
    many = 100
    shells = await asyncio.gather(*(Shell.start(container) for _ in range(many)))
    meet = f"mkdir -p /tmp/here; cd /tmp/here; : > $$; until set -- *; [ $# -ge {many} ]; do sleep 0.1; done; echo $$"
    actions = await asyncio.gather(*(shell.run(meet) for shell in shells))
    assert len({action.output for action in actions}) == many
    await asyncio.gather(*(shell.close() for shell in shells))


HOSTILE = [
    "_prorl_end() { :; }; builtin() { :; }; printf() { :; }",
    "readonly -f _prorl_end; PWD='/x 0'; OLDPWD=",
    "exec </dev/null",
    "exec 0<&- 2>&-",
    "trap 'echo trapped' DEBUG ERR RETURN EXIT; set -xv",
    "PROMPT_COMMAND='echo prompt'; PS0=ps0; PS4=; IFS=0123456789abcdef",
    "stty raw -echo; stty intr undef",
    "kill -STOP $$",
    "suspend -f",
    "ulimit -f 0 -n 3",
    "alias eval=: printf=: builtin=:; enable -n printf eval builtin",
    "set -o posix; set -u; set -o vi; shopt -s extdebug",
    "while read -r -t 0.2 line; do echo $line; done </proc/$$/fd/0",
    "printf '\\036'; cat /dev/urandom | head -c 100000; tput reset; printf '\\033[6n\\0'",
]


async def test_whatever_a_command_does_to_its_shell_the_next_one_is_told_the_truth(container: Container) -> None:
    """It goes on, or it is said to have ended and can be started again; nothing is out of step."""

    async def attack(command: str) -> None:
        async with await Shell.start(container) as shell:
            done = await shell.run(command, timeout_s=1, silence_s=None)
            for _ in range(2):
                if done.exited:
                    await shell.restart()
                done = await shell.run('echo "a$((40 + 2))b"; (exit 3)', timeout_s=3, silence_s=None)
                assert done.exited or ("a42b" in done.output and done.exit_code == 3), (command, done)
            await shell.restart()
            fresh = await shell.run("echo fresh; cat", timeout_s=1, silence_s=None)
            assert fresh.output.startswith("fresh\n"), (command, fresh)

    await asyncio.gather(*(attack(command) for command in HOSTILE))
