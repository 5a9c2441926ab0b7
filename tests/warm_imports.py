"""Imports of the fork server (`tests.warm`): those of a peer."""

import torch

import diloco.cli.main
import diloco.observe.report
import diloco.observe.screen  # noqa: F401

torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # the first one has torch import its compiler
