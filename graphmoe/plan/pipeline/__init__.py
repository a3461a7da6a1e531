"""Stages, schedules and their tables: which rank computes what, and when."""
