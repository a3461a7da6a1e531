"""Pipeline stages, schedules and their tables."""
