"""Imports of the fork server (`tests.warm`): those of a peer and of other commands, and what hivemind imports.

Commands import most of it only when they run: forks that had to would take twice the CPU time until a first version.
Not hivemind itself, which changes how torch shares tensors and how levels of the log are called.
"""
# ruff: noqa: F401

import gc

import cryptography.hazmat.primitives.asymmetric.rsa
import msgpack
import scipy.stats
import torch
import uvloop

import diloco.accounts.audit
import diloco.accounts.replay
import diloco.cli.main
import diloco.observe.report
import diloco.observe.screen
import diloco.run.launch
import diloco.run.operate
import diloco.run.trainer
import diloco.run.witness
import diloco.simulate.chaos.drill
import diloco.simulate.local.simulation
import diloco.transport.dht_node
import tests.warm_spares

torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # the first one has torch import its compiler

gc.collect()
gc.freeze()
