"""Chaos drills: real peers on one machine, and everything that can happen to them (`scripts/chaos`)."""
