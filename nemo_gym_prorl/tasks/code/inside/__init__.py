# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Grader program that runs inside the grading sandbox; Python 3.8, standard library only."""
