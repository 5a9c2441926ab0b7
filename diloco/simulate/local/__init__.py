"""`diloco simulate`: real peers as processes of this machine, and the DDP baseline."""
