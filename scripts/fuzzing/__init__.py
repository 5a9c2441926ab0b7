"""Fuzzing of all that reads bytes of others: `scripts/fuzz`."""
