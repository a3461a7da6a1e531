"""Optimizers and the sums of gradients over ranks."""
