"""Rules of a configuration, by subject."""
