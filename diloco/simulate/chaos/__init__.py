"""Real peers on one machine, and everything that can happen to them: `scripts/chaos`."""
