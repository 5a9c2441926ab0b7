"""Plans of simulations, and what follows from them alone.

plan.py    the faults of a simulation and when they come, as a text too
draw.py    a plan drawn from a seed
kinds.py   kinds of faults as they are drawn
agreement.py, storage.py   situations that chance seldom makes, in which a rule decides
setup.py   contract and site of a plan, and the noise that takes the place of inner steps
lies.py    bytes of a lying peer
"""
