# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""From one command to the next a shell is as bash is at a terminal: its files, its special variables, its options."""

from __future__ import annotations

import re

import pytest

from nemo_gym_prorl.sandbox.container import Container
from nemo_gym_prorl.sandbox.sessions.shell import Shell


pytestmark = [pytest.mark.sandbox, pytest.mark.usefixtures("way")]

NAME = r"/dev/pts/\d+"

TERMINALS = {
    "standard input": "tty",
    "standard output": "tty <&1",
    "standard error": "tty <&2",
    "the files of a program": "readlink /proc/self/fd/0; readlink /proc/self/fd/1; readlink /proc/self/fd/2",
    "in a subshell": "(tty; tty <&2)",
    "in a pipeline": "tty <&2 | cat",
    "in a function": "f() { tty; tty <&2; }; f",
    "in the background": "tty <&2 & wait 2>/dev/null",
    "by the C library": "python3 -c 'import os; print(*(os.ttyname(file) for file in range(3)), sep=chr(10))'",
    "after the shell's own were moved": "exec 5>&1; exec >/dev/null; exec >&5; tty; tty <&2",
    "of one file": 'test /dev/fd/0 -ef /dev/fd/1 && test /dev/fd/1 -ef "$(tty)" && tty',
    "opened by its name": 'echo "$(tty)" >"$(tty)"',
}


@pytest.mark.parametrize("what", TERMINALS)
async def test_a_shells_files_are_its_terminal_by_name(what: str, shell: Shell) -> None:
    said = (await shell.run(TERMINALS[what])).output.splitlines()
    named = [line for line in said if not line.startswith("[")]
    assert named
    assert len(set(named)) == 1, said
    assert re.fullmatch(NAME, named[0])


KEPT = {
    # A command, the next one, and what that prints.
    "a pipeline": ("false | true | (exit 3)", "echo ${PIPESTATUS[@]} $?", "1 0 3 3"),
    "a pipeline that ended well": ("(exit 2) | true", "echo ${PIPESTATUS[@]} $?", "2 0 0"),
    "a failing pipeline of one": ("(exit 7)", "echo ${PIPESTATUS[@]} $?", "7 7"),
    "an inverted failure": ("! false", "echo $? ${PIPESTATUS[@]}", "0 1"),
    "an inverted success": ("! true", "echo $? ${PIPESTATUS[@]}", "1 0"),
    "an inverted pipeline": ("! false | true", "echo $? ${PIPESTATUS[@]}", "1 1 0"),
    "with pipefail": ("set -o pipefail; false | true", "echo $? ${PIPESTATUS[@]}; set +o pipefail", "1 1 0"),
    "with pipefail, inverted": (
        "set -o pipefail; ! false | true",
        "echo $? ${PIPESTATUS[@]}; set +o pipefail",
        "0 1 0",
    ),
    "a signal": ("sh -c 'kill -9 $$' | true", "echo ${PIPESTATUS[@]}", "137 0"),
    "of a heredoc": ("cat <<'X' | (cat >/dev/null; exit 1)\na\nX", "echo ${PIPESTATUS[@]} $?", "0 1 1"),
    "of a heredoc with tabs": ("cat <<-X | (cat >/dev/null; exit 1)\n\ta\n\tX", "echo ${PIPESTATUS[@]}", "0 1"),
    "of a here-string": ("cat <<<a | (cat >/dev/null; exit 4)", "echo ${PIPESTATUS[@]}", "0 4"),
    "with a comment": ("false | true # a \\ b", "echo ${PIPESTATUS[@]}", "1 0"),
    "of several lines": ("true\nfalse | true\n\n", "echo ${PIPESTATUS[@]}", "1 0"),
    "in a function": ("f() { false | true; }; f", "echo ${PIPESTATUS[@]}", "0"),
    "a strange separator": ("IFS=; false | true", "echo ${PIPESTATUS[@]}; unset IFS", "1 0"),
    "unset variables forbidden": ("set -u; false | true", "echo ${PIPESTATUS[@]}; set +u", "1 0"),
    "the last word": ("echo a b >/dev/null", "echo $_", "b"),
    "the last word of a failure": ("ls /nowhere 2>/dev/null", "echo $_ $?", "/nowhere 2"),
    "a made folder": ("mkdir -p '/tmp/a b'", 'cd "$_" && pwd', "/tmp/a b"),
    "a last word with quotes": (': "it\'s" \'"so" $(id) `x`\'', 'echo "$_"', '"so" $(id) `x`'),
    "a last word that is an option": (": -n", 'printf "%s\\n" "$_"', "-n"),
    "no last word": (": ''", 'echo "[$_]"', "[]"),
    "the last word of an assignment": (": a; b=c", 'echo "[$_]"', "[]"),
    "the last word of a pipeline": (": a; echo x | cat >/dev/null", "echo $_", "a"),
    "both": ("false a | true b; : c | (exit 5)", "echo ${PIPESTATUS[@]} $?", "0 5 5"),
    "a pipeline of many": (
        " | ".join(["(exit 7)"] * 40),
        "echo ${#PIPESTATUS[@]} ${PIPESTATUS[39]}",
        "40 7",
    ),
    "of a group": ("{ false | true; }", "echo ${PIPESTATUS[@]}", "1 0"),
    "a last word that expands": (": 'a}b\\c\"$HOME`id`'", 'echo "$_"', 'a}b\\c"$HOME`id`'),
    "what was thrown away": ("false | true; echo $((1 / 0))", "echo ${PIPESTATUS[@]} $?", "1 1"),
    "an exit status": ("(exit 42)", "echo $?", "42"),
    "the process in the background": ("sleep 0.01 & p=$!; wait $p", "test $! = $p && echo same", "same"),
}


@pytest.mark.parametrize("what", KEPT)
async def test_what_a_command_leaves_the_next_one_finds(what: str, shell: Shell) -> None:
    command, following, expected = KEPT[what]
    await shell.run(command)
    assert (await shell.run(following)).output.splitlines()[-1:] == [expected]


UNFINISHED = {
    # What bash says of it, and nothing of ours becomes a part of it.
    "a heredoc": ("cat <<X\nno end", "no end\n", 0),
    "a heredoc whose end is indented": ("cat <<X\na\n X", "a\n X\n", 0),
    "a second heredoc": ("cat <<X <<Y\na\nX\nb", "b\n", 0),
    "a heredoc with a blank in its name": ("cat <<'A B'\nx\nA B", "x\n", 0),
    "a pattern": ("case x in", "unexpected end of file", 1),
    "a list of values": ("x=(", "unexpected EOF", 1),
    "a line that goes on": ("echo a \\", "a \\\n", 0),
    "a quote": ("echo 'a", "unexpected EOF", 1),
    "a double quote": ('echo "a', "unexpected EOF", 1),
    "a condition": ("if true; then", "unexpected end of file", 1),
    "a list": ("true &&", "unexpected end of file", 1),
    "a pipeline": ("true |", "unexpected end of file", 1),
    "a function": ("f()", "syntax error", 1),
    "a function by its word": ("function f", "syntax error", 1),
    "a loop": ("for i in 1 2", "syntax error", 1),
    "a parenthesis": ("(true", "unexpected end of file", 1),
    "a substitution": ("echo $(true", "unexpected EOF", 1),
}


@pytest.mark.parametrize("what", UNFINISHED)
async def test_what_is_unfinished_is_not_continued_by_us(what: str, shell: Shell) -> None:
    command, said, code = UNFINISHED[what]
    done = await shell.run(command)
    assert said in done.output
    assert "_prorl" not in done.output
    assert bool(done.exit_code) == bool(code)
    assert (await shell.run("echo on; declare -F")).output == "on\n"


OPTIONS = {
    "vi": ("set -o vi", "on"),
    "emacs": ("set -o emacs", "on"),
    "no vi": ("set +o vi", "on"),
    "no emacs": ("set +o emacs", "on"),
    "vi among others": ("true && set -o vi && echo went on; set -o emacs", "on"),
    "vi in a function": ("f() { set -o vi; }\nf\nf", "on"),
    "vi in a file": ("echo 'set -o vi; A=read' >/tmp/rc; . /tmp/rc; echo $A", "on"),
    "vi in a subshell": ("(set -o vi); set -o vi", "on"),
    "vi after another": ("set -o pipefail -o vi", "on; shopt -o pipefail | grep -c on", "1"),
    "vi by shopt": ("shopt -so vi; echo went on; shopt -s -o emacs", "on"),
    "no vi by shopt": ("shopt -uo vi emacs", "on"),
    "another by shopt": ("shopt -so pipefail nounset", "on; shopt -o pipefail nounset | grep -c on", "2"),
    "another option": ("set -o pipefail", "on; shopt -o pipefail | grep -c on", "1"),
    "another option off": ("set -o pipefail; set +o pipefail", "on; shopt -o pipefail | grep -c off", "1"),
    "two options": ("set -o pipefail -o noclobber", "on; shopt -o pipefail noclobber | grep -c on", "2"),
    "short options": ("set -fu +C", "on; shopt -o noglob nounset | grep -c on; set +fu", "2"),
    "arguments": ("set -- a 'b  c'", 'on; printf "%s," "$@"; echo', "a,b  c,"),
    "an option and arguments before": ("set -- a 'b  c'; set -o pipefail", 'on; printf "%s," "$@"; echo', "a,b  c,"),
    "arguments of a function": ("f() { set -- x; set -o pipefail; echo $1; }; set -- a; f", "on; echo $1", "a"),
}


@pytest.mark.parametrize("what", OPTIONS)
async def test_options_are_set_and_the_shell_lives(what: str, container: Container) -> None:
    command, following, *expected = OPTIONS[what]
    async with await Shell.start(container) as shell:
        done = await shell.run(command)
        assert (done.exit_code, done.exited) == (0, False), done
        said = await shell.run(f"echo {following}")
        assert said.output.split("\n") == ["on", *expected, ""]


AS_AT_A_TERMINAL = {
    # Commands of one shell, what each prints, and its exit code.
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
    "a trap of the exit": [("trap 'echo bye' EXIT", "", 0), ("echo $?", "0\n", 0), ("exit 2", "exit\nbye\n", 2)],
    "an exit that does nothing": [("exit() { :; }; false", "", 1), ("echo run", "run\n", 0), ("false", "", 1)],
    "statuses by another separator": [("IFS=0123456789; (exit 130)", "", 130), ('echo "$?"', "130\n", 0)],
}


@pytest.mark.parametrize("what", AS_AT_A_TERMINAL)
async def test_nothing_but_the_agents_commands_fails_or_is_trapped(what: str, shell: Shell) -> None:
    for command, output, code in AS_AT_A_TERMINAL[what]:
        done = await shell.run(command)
        assert (command, done.output, done.exit_code) == (command, output, code)


async def test_the_list_of_options_and_of_variables_can_be_had(shell: Shell) -> None:
    assert "pipefail" in (await shell.run("set -o")).output
    assert "set +o pipefail" in (await shell.run("set +o")).output
    assert "HOME=/root" in (await shell.run("set | grep ^HOME")).output


HISTORIES = {
    "at once": "history",
    "by fc": "fc -l 2>&1 | grep -v 'history specification'",
    "switched on": "set -o history; history",
    "in a file": "history -a /tmp/history; cat /tmp/history",
}


@pytest.mark.parametrize("what", HISTORIES)
async def test_the_history_has_no_line_of_ours(what: str, shell: Shell) -> None:
    said = (await shell.run(HISTORIES[what])).output
    assert "exec" not in said
    assert "_prorl" not in said


async def test_a_trace_shows_nothing_of_what_is_saved(shell: Shell) -> None:
    await shell.run("set -x")
    said = (await shell.run("false a | true b")).output
    assert "+ false a" in said
    assert "PIPESTATUS" not in said
    assert "/-/" not in said
    assert (await shell.run("set +x; echo ${PIPESTATUS[@]}")).output.endswith("0\n")
