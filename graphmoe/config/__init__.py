"""Every key of a run: its section, type, range and documentation."""
