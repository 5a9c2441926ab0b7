"""`diloco plan`: what a run needs and how long it takes, by arithmetic. Nothing is measured, nothing needs torch.

Read in this order:

    model.py         sizes of a transformer: of a preset, a contract, or of so many parameters
    hardware.py      accelerators by name, nodes and links; how numbers with units are read
    layout.py        a mesh of ranks: which are possible, and over which link a dimension talks
    memory.py        bytes per GPU by ZeRO stage, activations by recomputation; host memory of the outer state
    step.py          seconds of an inner step: compute, pipeline bubble, each collective on its link
    ranking.py       the layouts that fit, the fastest first, and what costs them most
    syncing.py       what data parallelism, DiLoCo and its variants send over the WAN
    timeline.py      one link in simulated time: how much of it computing waits
    published.py     the published table of bandwidth for a utilisation, beside ours
    question.py      from texts of the command line to what is to be planned
    answer.py        the plan
    text.py rows.py  a plan as aligned text, and as rows for programs
"""
