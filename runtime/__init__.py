"""Execution of a run: compile units, their graphs and code, the report, host tuning."""
