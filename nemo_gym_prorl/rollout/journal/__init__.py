# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What a service has accepted and what became of it, on disk: a restart forgets neither (docs/architecture.md)."""
