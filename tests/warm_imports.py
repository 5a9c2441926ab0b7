"""Imports of the fork server (`tests.warm`): those of a peer, and what hivemind imports.

Not hivemind itself, which changes how torch shares tensors and how levels of the log are called.
"""
# ruff: noqa: F401

import cryptography.hazmat.primitives.asymmetric.rsa
import msgpack
import scipy.stats
import torch
import uvloop

import diloco.cli.main
import diloco.observe.report
import diloco.observe.screen
import diloco.transport.dht_node
import tests.warm_spares

torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # the first one has torch import its compiler
