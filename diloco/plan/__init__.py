"""`diloco plan`: what a run needs and how long it takes, by arithmetic. Nothing is measured, nothing needs torch.

Read in this order:

    model.py      sizes of a transformer: of a preset, a contract, or of so many parameters
    hardware.py   an island: accelerators by name, nodes and links; meshes of its ranks, which of them are possible, and
                  over which link a dimension talks; how numbers with units are read
    cost.py       bytes per GPU and seconds of an inner step
    timeline.py   what data parallelism, DiLoCo and its variants send over the WAN, how much of it computing waits, and
                  the published table beside ours
    suggest.py    learning rates and batch for a size and a number of peers, by scaling laws
    question.py   from texts of the command line to what is to be planned
    answer.py     the plan: the layouts that fit, the fastest first, what costs them most; memory of hosts
    text.py       a plan as aligned text, and as rows for programs
"""
