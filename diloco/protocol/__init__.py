"""Agreement between peers, without I/O: messages in, effects out; votes, view, leases, lineages, parts still
missing."""
