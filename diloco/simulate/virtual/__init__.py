"""The deterministic simulator: whole production peers in virtual time; a failure is a seed.

A simulated process runs the code of a real one: `Run`, the peer's life, exchange, lane, outer steps, state copies,
ledger and checkpoints. Only what is beneath is simulated: the clock, the network, the disk, and the inner steps.

Read in this order:

    plan.py         what goes wrong and when: drawn from a seed, or read from a text
    timeline.py     virtual time: one queue of all that is to happen, and an event loop for each process
    world.py        the processes of one plan, and the end that all must come to
    process.py      one life of a peer, with observers at its seams; endpoint.py: its place on the network
    training.py     inner steps that are noise on 6,000 numbers, and what a liar sends
    setup.py        contract and site of a plan
    network.py      messages, calls and streams that are late, lost, doubled, cut off, damaged
    disk.py         files that survive a loss of power, or not
    faults.py       what each fault does; operator.py: what a person does about it
    invariants.py   I1 to I8 of the design, checked when something changes; means and versions made once more
    progress.py     what each peer trained, followed in pieces until a version counts it
    ballots.py      promises and votes, checked when they are given; gate.py: who and what is let in, and `Violation`
    transcript.py   what happened, as lines to read
    search.py       many seeds on all cores, and the shortest plan that still fails
    planted.py      bugs that must not stay hidden
    swarm.py        hundreds of peers: what each sends, holds and waits for (scripts/bench-swarm)
"""
