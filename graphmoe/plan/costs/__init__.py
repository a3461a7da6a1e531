"""Time and memory of parts of a step on a card."""
