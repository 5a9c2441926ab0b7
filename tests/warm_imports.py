"""What the fork server imports (`tests.warm`): what a peer does."""

import torch

import diloco.cli.bench
import diloco.cli.main
import diloco.cli.plan
import diloco.observe.report
import diloco.observe.screen  # noqa: F401

torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # the first one has torch import its compiler
