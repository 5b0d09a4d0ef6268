# SPDX-License-Identifier: Apache-2.0
"""What runs in sandboxes for more than one family of tasks. Nothing here imports anything of ours."""
