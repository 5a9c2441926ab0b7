"""Reaching other peers: this process's gate, links (gRPC, in memory), sockets, directory, presence, pacing."""
