"""Tensor maths of a round: fragments, pseudo-gradient, mean, outer state and optimizers, merge; the line of a peer."""
