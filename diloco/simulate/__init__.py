"""Simulation, apart from what a peer needs: real processes (local), virtual time, and faults on purpose (chaos)."""
