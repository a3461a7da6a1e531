"""Decisions that follow from a configuration by arithmetic, without a device."""
