# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""What runs beside a repository's tests, in the Python of its image: standard library only, Python 3.5 or later."""
