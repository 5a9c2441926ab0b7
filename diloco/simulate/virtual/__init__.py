"""The deterministic simulator: production protocol, codecs and outer step in virtual time; a failure is a seed.

Read in this order:

    plan.py         what goes wrong and when: drawn from a seed, or read from a text
    world.py        virtual time, the peers of one plan, and the end that all must come to
    host.py         one life of a peer, the exchange's half: what diloco/exchange/engine.py does with effects
    training.py     the other half: what diloco/peer/peer.py and diloco/run/trainer.py do, on a model of 22 numbers
    setup.py        the production parts that a plan asks for
    network.py      messages, questions and streams that are late, lost, doubled, cut off, damaged
    disk.py         checkpoints that survive, or not
    faults.py       what each fault does; lies.py: what a lying peer sends; operator.py: what a person does about it
    invariants.py   I1 to I8 of the design, checked when something changes
    ballots.py      promises and votes, checked when they are given; gate.py: who and what is let in, and `Violation`
    remake.py       means in plain numpy, and every version once more by the code of `diloco replay`
    transcript.py   what happened, as lines to read
    search.py       many seeds on all cores, and the shortest plan that still fails
    planted.py      bugs that must not stay hidden
    swarm.py        hundreds of peers: what each sends, holds and waits for (scripts/bench-swarm)
"""
