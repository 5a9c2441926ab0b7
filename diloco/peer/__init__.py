"""One peer's life: in, rounds, copies, out; what it takes from contract and site; when it sends, when it ends."""
