"""Our own inner loop: optimizers, evaluation, random states, the model on its ranks, what a step costs."""
