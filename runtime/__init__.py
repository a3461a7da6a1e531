"""How a run is executed: compile units, their graphs and code, the report, host tuning."""
