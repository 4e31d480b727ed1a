"""Implementations of the row primitives and of the corruption routines; each folder implements one backend."""
