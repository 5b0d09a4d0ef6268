# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""HTTP layer of all servers: application parts, client, keys, problem documents, tracing."""
