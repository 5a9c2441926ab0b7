"""Reaching other peers: this process's endpoint, links (gRPC, in memory), sockets, directory, presence, pacing."""

import os

# gRPC reads it when it is imported, which modules of this folder do. A lost peer is weather: no line on stderr for it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
