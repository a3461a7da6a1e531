"""The routed experts of one layer in mxfp8: what the operations of `ops.fp8_mlp` run on scales of 32 numbers.

Suffixes as there. Scales are the bytes of `ops.fp8_blocks`, one for 32 numbers of the last axis.

A token is stored once, along D, before its rows are gathered; h, its gradient and the activation along H and
F, block by block, which needs no whole row. Weight gradients contract rows: both sides are stored anew along
the rows of each expert, in blocks that begin at its first row, with zeros behind its last.
"""
