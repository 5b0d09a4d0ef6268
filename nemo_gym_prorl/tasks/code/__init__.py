# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Programs and functions, judged by many tests: rows of the published sets of programming contests."""
