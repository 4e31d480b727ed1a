"""Use inside host frameworks: each module is imported by its name, and needs its host only when it is used."""
