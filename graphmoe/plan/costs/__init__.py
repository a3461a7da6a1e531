"""Seconds and bytes of parts of a step on a card."""
