# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Training with NeMo RL: recipes, checks before a start, and replacements for parts of its controller."""
