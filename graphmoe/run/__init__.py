"""A run's folder: reading and writing its files."""
