# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that run inside a sandbox: standard library only, Python 3.8 or later."""
