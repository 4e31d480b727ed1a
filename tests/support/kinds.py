"""The names of the divergences, and non-default options for them."""

from dllm_kernels._backends._kinds import ALIASES, KINDS, NAMES

__all__ = ["ALIASES", "HALVES", "NAMES"]

HALVES = {  # half of each option's default
    name: {option: known.default / 2 for option, known in KINDS[name].options.items()}
    for name in NAMES
    if name in KINDS and KINDS[name].options
}
