"""Reaching other peers: this process's endpoint, links (gRPC, in memory), sockets, directory, presence, pacing."""
