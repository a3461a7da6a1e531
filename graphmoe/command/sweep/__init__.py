"""Sweeps: one job after the other, or side by side."""
