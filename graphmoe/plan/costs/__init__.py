"""Seconds and bytes that parts of a step take on a card."""
