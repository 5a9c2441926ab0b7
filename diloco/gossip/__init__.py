"""The other way of life: peers swap and average in pairs, nobody waits, there are no versions."""
