"""The deterministic simulator: whole production peers in virtual time; a failure is a seed.

A simulated process runs the code of a real one: `Run`, the peer's life, exchange, lane, outer steps, state copies,
ledger and checkpoints. Only what is beneath is simulated: the clock, the network, the disk, and the inner steps.

Read in this order:

    plans/          what goes wrong and when: drawn from a seed, or read from a text; contract and site; lies
    timeline.py     virtual time: one queue of all that is to happen, and an event loop for each process
    world.py        the processes of one plan, and the end that all must come to
    process.py      one life of a peer, with observers at its seams; endpoint.py: its place on the network
    training.py     inner steps that are noise on a model of two layers
    network.py      messages and calls that are late, lost, doubled, cut off, damaged
    streams.py      parts on their way, in pieces
    wires.py        bandwidth, tunnels and damaged bytes
    disk.py         files that survive a loss of power, or not; checkpoints.py: what it keeps of them
    faults.py       what each fault does; operator.py: what a person does about it
    oracle/         what must hold, checked without asking the code under test
    gossip.py       runs under gossip
    transcript.py   what happened, as lines to read
    search.py       many seeds on all cores, and the shortest plan that still fails
    planted.py      bugs that must not stay hidden
    swarm.py        hundreds of peers: what each sends, holds and waits for (scripts/bench-swarm)
"""
