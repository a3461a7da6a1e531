"""Findings about this machine."""
