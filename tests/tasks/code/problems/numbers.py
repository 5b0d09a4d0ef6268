# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Problems about numbers."""

from functools import cache
from itertools import count, product
from math import gcd, isqrt, lcm
from random import Random

from tests.tasks.code.problems.contest import Contest, ints, joined


def pair(low: int, high: int):
    return lambda random: f"{random.randint(low, high)} {random.randint(low, high)}\n"


def one(low: int, high: int):
    return lambda random: f"{random.randint(low, high)}\n"


def triple(random: Random) -> str:
    return f"{random.randint(0, 20)} {random.randint(0, 9)} {random.randint(1, 12)}\n"


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def zeros(text: str) -> int:
    factorial = 1
    for factor in range(2, int(text) + 1):
        factorial *= factor
    return len(str(factorial)) - len(str(factorial).rstrip("0"))


def crossed(number: int) -> int:
    return number if number < 10 else crossed(sum(map(int, str(number))))


@cache
def fibonacci(index: int) -> int:
    return index if index < 2 else fibonacci(index - 1) + fibonacci(index - 2)


NUMBERS = [
    Contest(
        "gcd and lcm", pair(1, 200), lambda t: joined((gcd(*ints(t)), lcm(*ints(t)))),
        "a, b = map(int, input().split())\nx, y = a, b\nwhile y:\n    x, y = y, x % y\nprint(x, a * b // x)\n",
        [("a * b // x", "a * b"), ("x % y", "x // y")],
    ),
    Contest(
        "primes up to n", one(1, 200), lambda t: sum(len(divisors(k)) == 2 for k in range(1, int(t) + 1)),
        "n = int(input())\nsieve = [True] * (n + 1)\nsieve[:2] = [False] * min(2, n + 1)\nfor p in range(2, n + 1):\n"
        "    if sieve[p]:\n        for m in range(p * p, n + 1, p):\n            sieve[m] = False\nprint(sum(sieve[:n + 1]))\n",
        [("sum(sieve[:n + 1])", "sum(sieve[:n])"), ("range(p * p, n + 1, p)", "range(2 * p, n // 2, p)")],
    ),
    Contest(
        "number of divisors", one(1, 400), lambda t: len(divisors(int(t))),
        "n = int(input())\ntotal, p = 1, 2\nwhile p * p <= n:\n    k = 1\n    while n % p == 0:\n        n //= p\n        k += 1\n"
        "    total *= k\n    p += 1\nprint(total * (2 if n > 1 else 1))\n",
        [("k = 1", "k = 0"), ("2 if n > 1 else 1", "1")],
    ),
    Contest(
        "power modulo", triple, lambda t: (lambda a, e, m: a**e % m)(*ints(t)),
        "a, e, m = map(int, input().split())\nr = 1 % m\nwhile e:\n    if e & 1:\n        r = r * a % m\n    a = a * a % m\n"
        "    e >>= 1\nprint(r)\n",
        [("e >>= 1", "e >>= 2"), ("e & 1", "e > 1")],
    ),
    Contest(
        "zeros of a factorial", one(0, 130), zeros,
        "n = int(input())\ntotal = 0\nwhile n:\n    n //= 5\n    total += n\nprint(total)\n",
        [("while n:", "if n:")],
    ),
    Contest(
        "digit sum until one digit", one(0, 10**9), lambda t: crossed(int(t)),
        "n = int(input())\nprint(0 if n == 0 else 1 + (n - 1) % 9)\n",
        [("1 + (n - 1) % 9", "n % 9"), ("(n - 1) % 9", "(n + 1) % 9")],
    ),
    Contest(
        "count ones in binary", one(0, 5000), lambda t: bin(int(t)).count("1"),
        "n = int(input())\nc = 0\nwhile n:\n    n &= n - 1\n    c += 1\nprint(c)\n",
        [("n &= n - 1", "n >>= 1")],
    ),
    Contest(
        "to another base", lambda r: f"{r.randint(0, 199)} {r.randint(2, 9)}\n",
        lambda t: next(
            int("".join(map(str, digits))) for size in count(1) for digits in product(range(int(t.split()[1])), repeat=size)
            if sum(d * int(t.split()[1]) ** i for i, d in enumerate(reversed(digits))) == int(t.split()[0])
        ),
        "n, b = map(int, input().split())\nout = ''\nwhile n:\n    n, d = divmod(n, b)\n    out = str(d) + out\nprint(out or 0)\n",
        [("str(d) + out", "out + str(d)"), ("divmod(n, b)", "divmod(n, b + 1)")],
    ),
    Contest(
        "sum of two squares", one(0, 150),
        lambda t: "yes" if any(a * a + b * b == int(t) for a in range(13) for b in range(13)) else "no",
        "from math import isqrt\nn = int(input())\nprint('yes' if any(isqrt(n - a * a) ** 2 == n - a * a "
        "for a in range(isqrt(n) + 1)) else 'no')\n",
        [("range(isqrt(n) + 1)", "range(1, isqrt(n))"), ("'yes' if", "'no' if not")],
    ),
    Contest(
        "integer root", one(0, 10**6), lambda t: isqrt(int(t)),
        "n = int(input())\nlow, high = 0, n + 1\nwhile high - low > 1:\n    mid = (low + high) // 2\n"
        "    if mid * mid <= n:\n        low = mid\n    else:\n        high = mid\nprint(low)\n",
        [("print(low)", "print(high)"), ("low, high = 0, n + 1", "low, high = 0, min(n + 1, 700)")],
    ),
    Contest(
        "fibonacci modulo", one(0, 60), lambda t: fibonacci(int(t)) % 1000007,
        "n = int(input())\na, b = 0, 1\nfor _ in range(n):\n    a, b = b, (a + b) % 1000007\nprint(a)\n",
        [("range(n)", "range(n + 1)"), ("(a + b) % 1000007", "a + b")],
    ),
]  # fmt: skip
