"""Several ranks of one simulated peer: their threads, all that passes between them, and their lines as one."""
