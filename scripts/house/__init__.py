"""The state of the code: its numbers, the files that a round crosses, and a trial of its names."""
