"""Start of a command: configuration, errors, sweeps."""
