"""One step of a rank on tensors without data: what it would say to other ranks, and what it would hold."""
