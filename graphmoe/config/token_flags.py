"""Flags in the upper bits of token ids, with which data=chat marks labels and documents in a batch."""

NO_LABEL = 1 << 30
"""The loss ignores this token as a label."""
START = 1 << 29
"""A document starts at this token."""
ID_BITS = START - 1
"""Bits of the token id."""
