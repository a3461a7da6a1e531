"""The folder of a run: its files, how they are written and read again."""
