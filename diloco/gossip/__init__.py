"""The other kind of run: peers swap weights and average in pairs, nobody waits, and there are no versions."""
