# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Problems about lists of numbers."""

from itertools import combinations, permutations
from random import Random
from statistics import median

from tests.tasks.code.problems.contest import Contest, ints, joined, listing


def items(text: str) -> list[int]:
    """The numbers of a listing, which stand in the second line."""
    return ints(text.split("\n")[1])


def with_target(random: Random) -> str:
    return listing(random, low=0, high=9) + f"{random.randint(0, 20)}\n"


def target(text: str) -> int:
    return int(text.split("\n")[2])


def windows(text: str) -> list[list[int]]:
    a = items(text)
    return [a[i:j] for i in range(len(a)) for j in range(i + 1, len(a) + 1)]


def intervals(random: Random) -> str:
    pairs = [sorted((random.randint(0, 12), random.randint(0, 12))) for _ in range(random.randint(1, 6))]
    return f"{len(pairs)}\n" + "".join(f"{joined(pair)}\n" for pair in pairs)


def pairs_of(text: str) -> list[list[int]]:
    return [ints(line) for line in text.split("\n")[1:] if line]


def rotation(random: Random) -> str:
    return listing(random) + f"{random.randint(0, 12)}\n"


def positive(random: Random) -> str:
    return listing(random, low=0, high=6)


READ = "n = int(input())\na = list(map(int, input().split()))\n"

SEQUENCES = [
    Contest(
        "largest sum of a piece", listing, lambda t: max(map(sum, windows(t))),
        READ + "best = here = a[0]\nfor x in a[1:]:\n    here = max(x, here + x)\n    best = max(best, here)\nprint(best)\n",
        [("best = here = a[0]", "best = here = 0"), ("max(x, here + x)", "here + x")],
    ),
    Contest(
        "pairs with a sum", with_target, lambda t: sum(x + y == target(t) for x, y in combinations(items(t), 2)),
        READ + "s = int(input())\nseen = {}\nc = 0\nfor x in a:\n    c += seen.get(s - x, 0)\n    seen[x] = seen.get(x, 0) + 1\nprint(c)\n",
        [("seen.get(x, 0) + 1", "1"), ("s - x", "s + x")],
    ),
    Contest(
        "inversions", listing, lambda t: sum(x > y for x, y in combinations(items(t), 2)),
        READ + "from bisect import bisect_right, insort\ndone = []\nc = 0\nfor x in a:\n    c += len(done) - bisect_right(done, x)\n"
        "    insort(done, x)\nprint(c)\n",
        [("len(done) - bisect_right", "bisect_right"), ("c = 0", "c = 1")],
    ),
    Contest(
        "longest rising subsequence", listing,
        lambda t: max(k for k in range(len(items(t)) + 1) if any(list(c) == sorted(set(c)) for c in combinations(items(t), k))),
        READ + "from bisect import bisect_left\ntails = []\nfor x in a:\n    i = bisect_left(tails, x)\n    tails[i:i + 1] = [x]\nprint(len(tails))\n",
        [("bisect_left(tails, x)", "__import__('bisect').bisect_right(tails, x)"), ("len(tails)", "len(set(a))")],
    ),
    Contest(
        "median", listing, lambda t: f"{median(items(t)):.1f}",
        READ + "a.sort()\nprint((a[n // 2] + a[(n - 1) // 2]) / 2)\n",
        [("a.sort()\n", "\n"), ("a[(n - 1) // 2]", "a[n // 2]")],
    ),
    Contest(
        "rotate", rotation, lambda t: joined((items(t) * 20)[target(t):][: len(items(t))]),
        READ + "k = int(input()) % n\nprint(*(a[k:] + a[:k]))\n",
        [(" % n", ""), ("a[k:] + a[:k]", "a[-k:] + a[:-k]")],
    ),
    Contest(
        "second largest value", lambda r: listing(r, high=3, low=0),
        lambda t: max((x for x in items(t) if any(y > x for y in items(t))), default="none"),
        READ + "d = sorted(set(a))\nprint(d[-2] if len(d) > 1 else 'none')\n",
        [("sorted(set(a))", "sorted(a)"), ("d[-2]", "d[0]")],
    ),
    Contest(
        "most frequent value", lambda r: listing(r, high=4, low=0),
        lambda t: min((-items(t).count(x), x) for x in items(t))[1],
        READ + "from collections import Counter\nc = Counter(a)\nprint(min(c, key=lambda x: (-c[x], x)))\n",
        [("(-c[x], x)", "-c[x]"), ("-c[x], x", "c[x], x")],
    ),
    Contest(
        "merged length of intervals", intervals,
        lambda t: len({x for low, high in pairs_of(t) for x in range(low, high)}),
        "n = int(input())\np = sorted(tuple(map(int, input().split())) for _ in range(n))\ntotal, end = 0, -1\nfor low, high in p:\n"
        "    total += max(0, high - max(low, end))\n    end = max(end, high)\nprint(total)\n",
        [("end = max(end, high)", "end = high"), ("max(low, end)", "low")],
    ),
    Contest(
        "most intervals that don't meet", intervals,
        lambda t: max(
            k for k in range(len(pairs_of(t)) + 1) for c in combinations(pairs_of(t), k)
            if all(a[1] < b[0] or b[1] < a[0] for a, b in combinations(c, 2))
        ),
        "n = int(input())\np = sorted((tuple(map(int, input().split())) for _ in range(n)), key=lambda q: q[1])\nc, end = 0, -1\n"
        "for low, high in p:\n    if low > end:\n        c, end = c + 1, high\nprint(c)\n",
        [("key=lambda q: q[1]", "key=lambda q: q[0]"), ("low > end", "low >= end")],
    ),
    Contest(
        "water between walls", positive,
        lambda t: sum(min(max(items(t)[: i + 1]), max(items(t)[i:])) - x for i, x in enumerate(items(t))),
        READ + "i, j = 0, n - 1\nl = r = w = 0\nwhile i < j:\n    l, r = max(l, a[i]), max(r, a[j])\n    if l < r:\n        w += l - a[i]\n"
        "        i += 1\n    else:\n        w += r - a[j]\n        j -= 1\nprint(w)\n",
        [("w += r - a[j]", "w += 0"), ("if l < r:", "if l > r:")],
    ),
    Contest(
        "largest rectangle under bars", positive,
        lambda t: max(min(w) * len(w) for w in windows(t)),
        READ + "a.append(0)\nstack, best = [], 0\nfor i, h in enumerate(a):\n    start = i\n    while stack and stack[-1][1] >= h:\n"
        "        start, old = stack.pop()\n        best = max(best, old * (i - start))\n    stack.append((start, h))\nprint(best)\n",
        [("a.append(0)\n", "\n"), ("(i - start)", "(i - start + 1)")],
    ),
    Contest(
        "shortest piece with a sum", with_target,
        lambda t: min((len(w) for w in windows(t) if sum(w) >= target(t)), default=0),
        READ + "s = int(input())\ni = total = 0\nbest = n + 1\nfor j, x in enumerate(a):\n    total += x\n    while total >= s and i <= j:\n"
        "        best = min(best, j - i + 1)\n        total -= a[i]\n        i += 1\nprint(best if best <= n else 0)\n",
        [("j - i + 1", "j - i"), ("best if best <= n else 0", "best")],
    ),
    Contest(
        "next permutation", lambda r: listing(r, most=5, low=1, high=4),
        lambda t: joined(min((p for p in permutations(items(t)) if p > tuple(items(t))), default=sorted(items(t)))),
        READ + "i = n - 2\nwhile i >= 0 and a[i] >= a[i + 1]:\n    i -= 1\nif i >= 0:\n    j = n - 1\n    while a[j] <= a[i]:\n        j -= 1\n"
        "    a[i], a[j] = a[j], a[i]\na[i + 1:] = a[i + 1:][::-1]\nprint(*a)\n",
        [("a[i] >= a[i + 1]", "a[i] > a[i + 1]"), ("a[i + 1:] = a[i + 1:][::-1]\n", "\n")],
    ),
    Contest(
        "first missing positive", lambda r: listing(r, low=-1, high=4), lambda t: next(x for x in range(1, 99) if x not in items(t)),
        READ + "s = set(a)\nx = 1\nwhile x in s:\n    x += 1\nprint(x)\n",
        [("x = 1", "x = min(s)"), ("while x in s", "if x in s")],
    ),
]  # fmt: skip
