"""What drives a peer: found and join, trainer, launch, follower ranks, witness; status, evict, export, eval."""
