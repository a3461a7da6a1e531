"""Stages of a model on several ranks: schedules, their check, their simulation, and what runs them."""
