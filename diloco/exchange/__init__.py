"""The exchange: carries out the protocol with real bytes, on lanes. `engine.py` drives the protocol's state machine."""
