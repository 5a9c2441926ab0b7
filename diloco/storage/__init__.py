"""Checkpoints: what of a line they hold, files and hashes, writing beside training, reading."""
