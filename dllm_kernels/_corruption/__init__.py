"""Corruption routines and top-k selection below the public functions."""
