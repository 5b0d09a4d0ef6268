# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's trainers over our rollout services: recipes, the checks before a start, and what they put in place."""
