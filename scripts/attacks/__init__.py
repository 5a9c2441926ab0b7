"""Attacks on runs of real peers: what an outsider, a careless operator and a lying member can try."""
