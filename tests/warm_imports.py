"""What the fork server imports (`tests.warm`): what a peer does."""

import torch

import diloco.cli
import diloco.cli_bench
import diloco.cli_plan
import diloco.launch
import diloco.report
import diloco.screen  # noqa: F401

torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # the first one has torch import its compiler
