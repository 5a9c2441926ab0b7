"""The exchange: how peers find each other, agree on versions, and move bytes. `machine.py` is the protocol."""
