"""Simulation, apart from what a peer needs: processes (local), virtual time, faults (chaos), a link in memory."""
