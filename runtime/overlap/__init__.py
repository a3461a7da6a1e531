"""Overlap of the backward of one micro-batch with the forward of the next."""
