"""Configuration rules by subject."""
