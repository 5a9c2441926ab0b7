"""Runs of a peer: found, join and `Run`; trainer, launch and witness; status, evict, export, scaling."""
