"""Facts of this machine: `__main__.py` is the command."""
