# SPDX-License-Identifier: Apache-2.0
"""Texts that are beginnings of each other, under arbitrary growth, branching and lack of room."""

from __future__ import annotations

from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st

from nemo_gym_prorl.policy.beginnings import Beginnings
from nemo_gym_prorl.policy.text.prompts import Prompts, Written


TEXT = st.text("ab", max_size=4)


@given(data=st.data(), room=st.integers(0, 30))
def test_a_name_has_its_own_text_or_none(data: st.DataObject, room: int) -> None:
    texts = Beginnings[str](room)
    forgotten: dict[Hashable, str] = {}
    right: dict[Hashable, str] = {}
    for _ in range(data.draw(st.integers(1, 20))):
        name = data.draw(st.integers(0, 8))
        before = data.draw(st.sampled_from([None, *right]))
        honest = before is not None and data.draw(st.booleans())
        right[name] = (right[before] if honest else "") + data.draw(TEXT)
        forgotten.pop(name, None)
        gone = texts.add(name, right[name], before)
        assert not forgotten.keys() & {one for one, _ in gone}
        forgotten.update(gone)
        assert texts.get(name) == right[name], "what was added last is there"
        for one in data.draw(st.lists(st.sampled_from(list(right)), max_size=3)):
            assert texts.get(one) in (None, right[one])
        assert {one for one in right if texts.get(one) is None} == forgotten.keys()
        assert all(right[one] == text for one, text in forgotten.items())


def test_no_more_is_kept_than_there_is_room_for() -> None:
    texts = Beginnings[str](room=10)
    texts.add("trunk", "0123456789")
    for branch in range(5):
        texts.add(branch, f"0123456789{branch}", "trunk")
    assert [name for name in ("trunk", *range(5)) if texts.get(name)] == [4]


@given(data=st.data())
def test_a_prompt_is_known_again_whether_or_not_its_text_is_kept(data: st.DataObject) -> None:
    prompts, right = Prompts(), dict[int, str]()
    prompts._texts._room = data.draw(st.integers(0, 20))
    for name in range(data.draw(st.integers(1, 12))):
        before = data.draw(st.sampled_from([None, *right]))
        right[name] = (right[before] if before is not None else "") + data.draw(TEXT)
        prompts.add(name, Written.of(right[name]), before)
    for name, text in right.items():
        known = prompts.get(name)
        assert known is not None
        assert known.length == len(text)
        for other in [*data.draw(st.lists(st.text("ab", max_size=12), max_size=4)), *right.values()]:
            assert known.begins(other) == other.startswith(text)
