"""Rules that a configuration must keep, by their subject."""
