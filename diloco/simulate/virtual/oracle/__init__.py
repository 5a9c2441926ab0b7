"""Checks of a simulation that do not ask the code under test.

Read in this order:

    gate.py         who and what is let in, and `Violation`
    invariants.py   I1 to I8 of the design, checked when something changes; means and versions made once more
    ballots.py      promises and votes, checked when they are given
    apart.py        lineages apart, by the messages that each life heard
    progress.py     what each peer trained, followed in pieces until a version counts it
    copies.py       copies of the state: whole, and not given up too early
    lanes.py        the work of each lane, which is that of its state machine, and its streams
    promise.py      whether versions must close now, by what the rules promise
    machines.py     which processes share a machine, and which deaths its kernel proves
    endings.py      errors that end a process, each of which a fault must explain
    afterwards.py   what is checked in the end: ledgers, totals, and that what was agreed on stayed
"""
