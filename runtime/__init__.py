"""How a run is executed: host tuning here; segments are run by the model's own plain forward."""
