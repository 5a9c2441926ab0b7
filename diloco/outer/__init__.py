"""Tensor maths of the line: fragments, pseudo-gradient, feedback, mean, outer step and state, merge, resync."""
