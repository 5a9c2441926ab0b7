"""Mutants: bugs planted one at a time in a copy of the package, for the simulator to find."""
