"""Sweeps: jobs that run one after the other, or in parallel."""
