"""Trainers over the engine: one thin module each, imported by those who have the trainer."""
