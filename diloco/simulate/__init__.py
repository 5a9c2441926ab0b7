"""Runs on one machine: real processes on loopback, and the baselines to compare with."""
