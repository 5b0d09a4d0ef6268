# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Scripts of environments, for machines without a model: what a policy that knows the answer would say, or a cheat."""
