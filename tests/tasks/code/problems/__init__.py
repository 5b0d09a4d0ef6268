# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Programming problems of our own, each with an answer by brute force, a solution, and wrong programs."""

from tests.tasks.code.problems.numbers import NUMBERS
from tests.tasks.code.problems.sequences import SEQUENCES
from tests.tasks.code.problems.words import WORDS


CONTESTS = [*NUMBERS, *SEQUENCES, *WORDS]
