# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Which of a message's fenced blocks is the program."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.tasks.code.task import program_in


CODE = "n = int(input())\nprint(n + 1)\n"
DRAFT = "print('draft')\n"


def fenced(code: str, label: str = "python", fence: str = "```") -> str:
    return f"{fence}{label}\n{code}{fence}\n"


INDENTED = "".join(f"   {line}\n" for line in fenced(CODE).splitlines())
MESSAGES = {
    "one": fenced(CODE),
    "no label": fenced(CODE, ""),
    "py": fenced(CODE, "py"),
    "Python3": fenced(CODE, "Python3"),
    "label with more": fenced(CODE, 'python title="a.py"'),
    "label in braces": fenced(CODE, "{.python}"),
    "space before the label": fenced(CODE, " python"),
    "space behind the label": fenced(CODE, "python  "),
    "the last of two": fenced(DRAFT) + "Better:\n" + fenced(CODE),
    "the last without a label": fenced(DRAFT) + "Better:\n" + fenced(CODE, ""),
    "shell behind it": fenced(CODE) + "Run it:\n" + fenced("python3 solution.py < in.txt\n", "bash"),
    "console behind it": fenced(CODE) + fenced("$ python3 solution.py\n2\n", "console"),
    "text behind it": fenced(CODE) + "Output:\n" + fenced("2\n", "text"),
    "output behind it": fenced(CODE) + "Output:\n" + fenced("2\n", "output"),
    "json behind it": fenced(CODE) + fenced('{"a": 1}\n', "json"),
    "another language behind it": fenced(CODE) + fenced("int main() { return 0; }\n", "cpp"),
    "unlabelled output behind it": fenced(CODE) + "Sample output:\n" + fenced("2\n", ""),
    "unlabelled words behind it": fenced(CODE, "") + "Sample:\n" + fenced("1 2 3\nYES\n", ""),
    "unlabelled shell behind it": fenced(CODE) + fenced("python3 solution.py\n", ""),
    "shell before it": fenced("pip install numpy\n", "bash") + fenced(CODE),
    "not closed": "Here:\n```python\n" + CODE,
    "the last not closed": fenced(DRAFT) + "```python\n" + CODE,
    "in a list": "1. The program:\n\n" + INDENTED,
    "at the mark of a list": "- ```python\n" + "".join(f"  {line}\n" for line in CODE.splitlines()) + "  ```\n",
    "tildes": fenced(CODE, fence="~~~"),
    "tildes without a label": fenced(CODE, "", "~~~"),
    "four backquotes": fenced(CODE, fence="````"),
    "behind words": "The program: ```python\n" + CODE + "```",
    "closed behind the last line": "```python\n" + CODE.rstrip() + "```\nDone.",
    "closed by more": "```python\n" + CODE + "`````\nDone.",
    "windows": fenced(CODE).replace("\n", "\r\n"),
    "behind words with a tilde": "It takes ~5 ms: ```python\n" + CODE + "```",
    "behind code in a line": "It is not ```x```.\n" + fenced(CODE),
    "no block": CODE,
}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_program_of_a_message(name: str) -> None:
    assert program_in(MESSAGES[name]) == CODE


@pytest.mark.parametrize(
    ("message", "program"),
    [
        ("```python\ntext = '''\n~~~\n'''\nprint(text)\n```", "text = '''\n~~~\n'''\nprint(text)\n"),
        ("````python\nprint('''\n```\n''')\n````", "print('''\n```\n''')\n"),
        ("```bash\nls\n```", "ls\n"),
        ("", ""),
        ("```", "\n"),
        ("I can't.", "I can't."),
    ],
)
def test_other_messages(message: str, program: str) -> None:
    assert program_in(message).rstrip("\n") == program.rstrip("\n")


@given(st.text(alphabet="`~ \npython:=1-", max_size=80))
def test_no_message_is_too_odd(message: str) -> None:
    assert isinstance(program_in(message), str)


@pytest.mark.parametrize(
    "flood",
    [
        "`" * 10**6,
        "```\n" * 200_000,
        "~~~ ` " * 200_000,
        " " * 10**6 + "```",
        " " * 10**6 + "x\n```",
        "a = " * 200_000,
    ],
)
def test_a_flood_costs_no_time(flood: str) -> None:
    begin = time.process_time()
    program_in(flood)
    program_in("```\n" + flood)
    assert time.process_time() - begin < 2
