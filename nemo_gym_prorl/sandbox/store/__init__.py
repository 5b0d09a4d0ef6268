# SPDX-License-Identifier: Apache-2.0
"""Images that sandboxes start from: built from recipes, pulled from registries, unpacked where that starts faster."""
