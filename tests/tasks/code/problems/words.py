# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Problems about words."""

from itertools import combinations, permutations
from random import Random

from tests.tasks.code.problems.contest import Contest, word


def one(random: Random) -> str:
    return f"{word(random)}\n"


def two(random: Random) -> str:
    return f"{word(random, 6)}\n{word(random, 6)}\n"


def brackets(random: Random) -> str:
    return (
        f"{word(random, 6, '()[]')}\n"
        if random.random() < 0.5
        else f"{random.choice(['([])', '[()()]', '[)', '(()', '([)]'])}\n"
    )


def reduced(text: str) -> bool:
    said = text.strip()
    for _ in range(len(said)):
        said = said.replace("()", "").replace("[]", "")
    return not said


def pieces(text: str) -> list[str]:
    return [text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)]


def subsequences(text: str) -> set[str]:
    return {"".join(c) for k in range(len(text) + 1) for c in combinations(text, k)}


def distance(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0]))


def sentence(random: Random) -> str:
    return " ".join(word(random, 3) for _ in range(random.randint(1, 6))) + "\n"


WORDS = [
    Contest(
        "palindrome", lambda r: r.choice([one(r), (w := word(r, 4)) + w[::-1] + "\n"]),
        lambda t: "yes" if all(t.strip()[i] == t.strip()[-1 - i] for i in range(len(t.strip()))) else "no",
        "s = input()\nprint('yes' if s == s[::-1] else 'no')\n",
        [("s == s[::-1]", "s[0] == s[-1]"), ("s[::-1]", "s[1::-1]")],
    ),
    Contest(
        "brackets", brackets, lambda t: "yes" if reduced(t) else "no",
        "stack = []\nok = True\nfor c in input():\n    if c in '([':\n        stack.append(c)\n    elif not stack or stack.pop() + c not in ('()', '[]'):\n"
        "        ok = False\n        break\nprint('yes' if ok and not stack else 'no')\n",
        [("ok and not stack", "ok"), ("not in ('()', '[]')", "in ('(]',)")],
    ),
    Contest(
        "longest palindrome inside", one, lambda t: max(len(p) for p in pieces(t.strip()) if p == p[::-1]),
        "s = input()\nbest = 0\nfor c in range(2 * len(s) - 1):\n    i, j = c // 2, (c + 1) // 2\n    while i >= 0 and j < len(s) and s[i] == s[j]:\n"
        "        i, j = i - 1, j + 1\n    best = max(best, j - i - 1)\nprint(best)\n",
        [("(c + 1) // 2", "c // 2"), ("j - i - 1", "j - i")],
    ),
    Contest(
        "edit distance", lambda r: f"{word(r, 5)}\n{word(r, 5)}\n", lambda t: distance(*t.split()),
        "a, b = input(), input()\nd = list(range(len(b) + 1))\nfor i, x in enumerate(a, 1):\n    old, d[0] = d[0], i\n    for j, y in enumerate(b, 1):\n"
        "        old, d[j] = d[j], min(d[j] + 1, d[j - 1] + 1, old + (x != y))\nprint(d[-1])\n",
        [("old + (x != y)", "old + 1"), ("old, d[0] = d[0], i", "old = d[0]")],
    ),
    Contest(
        "longest common subsequence", two, lambda t: max(map(len, subsequences(t.split()[0]) & subsequences(t.split()[1]))),
        "a, b = input(), input()\nd = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]\nfor i, x in enumerate(a):\n    for j, y in enumerate(b):\n"
        "        d[i + 1][j + 1] = d[i][j] + 1 if x == y else max(d[i][j + 1], d[i + 1][j])\nprint(d[-1][-1])\n",
        [("max(d[i][j + 1], d[i + 1][j])", "0"), ("d[i][j] + 1 if x == y", "1 if x == y")],
    ),
    Contest(
        "occurrences, overlapping", lambda r: f"{word(r, 10, 'aab')}\n{r.choice(['a', 'aa', 'aba', 'ab'])}\n",
        lambda t: sum(p == t.split()[1] for p in pieces(t.split()[0])),
        "s, p = input(), input()\nc = i = 0\nwhile True:\n    i = s.find(p, i) + 1\n    if not i:\n        break\n    c += 1\nprint(c)\n",
        [("while True:\n    i = s.find(p, i) + 1\n    if not i:\n        break\n    c += 1\n", "c = s.count(p)\n")],
    ),
    Contest(
        "run lengths", one, lambda t: "".join(f"{c}{n}" for c, n in runs(t.strip())),
        "from itertools import groupby\nprint(''.join(k + str(len(list(g))) for k, g in groupby(input())))\n",
        [("groupby(input())", "groupby(sorted(input()))"), ("str(len(list(g)))", "'1'")],
    ),
    Contest(
        "anagrams", lambda r: r.choice([two(r), f"{(w := word(r, 5))}\n{''.join(r.sample(w, len(w)))}\n"]),
        lambda t: "yes" if tuple(t.split()[1]) in permutations(t.split()[0]) else "no",
        "print('yes' if sorted(input()) == sorted(input()) else 'no')\n",
        [("sorted(input()) == sorted(input())", "set(input()) == set(input())")],
    ),
    Contest(
        "first letter that is alone", one, lambda t: next((c for c in t.strip() if t.count(c) == 1), "-"),
        "s = input()\nfrom collections import Counter\nc = Counter(s)\nprint(next((x for x in s if c[x] == 1), '-'))\n",
        [("for x in s if", "for x in s[::-1] if"), ("'-'", "s[0]")],
    ),
    Contest(
        "words by length, then alphabet", sentence,
        lambda t: " ".join(min(permutations(t.split()), key=lambda p: [(len(w), w) for w in p])),
        "print(*sorted(sorted(input().split()), key=len))\n",
        [("sorted(sorted(input().split()), key=len)", "sorted(input().split())"), ("key=len", "key=lambda w: -len(w)")],
    ),
    Contest(
        "shift letters", lambda r: f"{word(r, 6, 'axyzXZ ')}.\n{r.randint(0, 30)}\n",
        lambda t: "".join(shifted(c, int(t.split("\n")[1])) for c in t.split("\n")[0]),
        "s = input()\nk = int(input())\ndef f(c):\n    if not c.isalpha():\n        return c\n    base = 97 if c.islower() else 65\n"
        "    return chr((ord(c) - base + k) % 26 + base)\nprint(''.join(map(f, s)))\n",
        [("% 26", "% 25"), ("97 if c.islower() else 65", "97")],
        checker="exact",
    ),
    Contest(
        "longest piece without repeats", one, lambda t: max(len(p) for p in pieces(t.strip()) if len(set(p)) == len(p)),
        "s = input()\nlast, start, best = {}, 0, 0\nfor i, c in enumerate(s):\n    start = max(start, last.get(c, -1) + 1)\n    last[c] = i\n"
        "    best = max(best, i - start + 1)\nprint(best)\n",
        [("max(start, last.get(c, -1) + 1)", "last.get(c, -1) + 1"), ("i - start + 1", "len(last)")],
    ),
]  # fmt: skip


def runs(text: str) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for letter in text:
        if found and found[-1][0] == letter:
            found[-1] = (letter, found[-1][1] + 1)
        else:
            found.append((letter, 1))
    return found


def shifted(letter: str, times: int) -> str:
    for _ in range(times if letter.isalpha() else 0):
        letter = {"z": "a", "Z": "A"}.get(letter) or chr(ord(letter) + 1)
    return letter
