"""Pages of one file that need no network."""
