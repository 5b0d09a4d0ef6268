# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Property test of the seccomp filter compiler, against an interpreter of the kernel's filter programs."""

import struct
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gym_prorl.syscall_filter import ALLOW, KILL, REFUSE, UNKNOWN, ArgumentRule, FilterAction, compile_filter


Call = tuple[int, int, tuple[int, ...]]
"""Architecture, number, arguments."""

MAX_INSTRUCTIONS = 4096  # the kernel's limit


def run_filter(program: bytes, call: Call) -> int:
    """Return the action that a filter program takes for a system call, as the kernel would."""
    architecture, number, arguments = call
    data = struct.pack("=iIQ6Q", number - (1 << 32) * (number >> 31), architecture, 0, *arguments)
    code = list(struct.iter_unpack("=HBBI", program))
    assert len(code) <= MAX_INSTRUCTIONS
    position, accumulator = 0, 0
    while True:
        operation, if_true, if_false, operand = code[position]
        position += 1
        match operation:
            case 0x20:
                accumulator = struct.unpack_from("=I", data, operand)[0]
            case 0x54:
                accumulator &= operand
            case 0x05:
                position += operand
            case 0x15:
                position += if_true if accumulator == operand else if_false
            case 0x35:
                position += if_true if accumulator >= operand else if_false
            case 0x06:
                return int(operand)
            case _:
                raise AssertionError(f"unknown instruction {operation:#x}")


def action_of(rules: Mapping[int, FilterAction], last: int, call: Call) -> int:
    """Return the action of the table of rules, looked up without a compiler."""
    _architecture, number, arguments = call
    if number > last:
        return UNKNOWN
    action = rules.get(number, ALLOW)
    while isinstance(action, ArgumentRule):
        seen = arguments[action.index] & 0xFFFFFFFF & action.mask
        action = action.then if seen in action.values else action.otherwise
    return action


WORDS = st.integers(0, 0xFFFFFFFF)
PLAIN = st.sampled_from([ALLOW, REFUSE, UNKNOWN, KILL])
RULES = st.builds(ArgumentRule, st.integers(0, 5), st.frozensets(WORDS, max_size=40), PLAIN, PLAIN, WORDS)
ARGUMENTS = st.tuples(*[st.integers(0, 2**64 - 1)] * 6)


@settings(max_examples=30)
@given(
    st.dictionaries(st.integers(0, 300), PLAIN | RULES, max_size=300),
    st.integers(0, 300),
    st.lists(st.tuples(st.just(7), st.integers(0, 310) | WORDS, ARGUMENTS), min_size=1),
    st.data(),
)
def test_a_compiled_filter_decides_like_its_table(
    rules: dict[int, FilterAction], last: int, calls: list[Call], data: st.DataObject
) -> None:
    program = compile_filter(7, rules, last)
    conditional = {number: rule for number, rule in rules.items() if isinstance(rule, ArgumentRule) and rule.values}
    if conditional:  # a drawn call hardly ever meets a condition
        number = data.draw(st.sampled_from(sorted(conditional)))
        rule = conditional[number]
        value = data.draw(st.sampled_from(sorted(rule.values))) | data.draw(WORDS) << 32
        calls.append((7, number, tuple(value if place == rule.index else 0 for place in range(6))))
    for call in calls:
        assert run_filter(program, call) == action_of(rules, last, call)
        assert run_filter(program, (8, *call[1:])) == KILL, "another architecture"
