"""Explicit-state search over the rules of agreement, for `scripts/model-check`."""
