"""The names of the divergences, and non-default options for them."""

from dllm_kernels.rows._divergence_kinds import ALIASES, KINDS, MULTIPLES, NAMES

__all__ = ["ALIASES", "HALVES", "NAMES", "OF_BOTH"]

# Kinds that depend on all of p and q; the others on one probability.
OF_BOTH = [name for name in NAMES if name in MULTIPLES or (name in KINDS and not KINDS[name].minus)]

HALVES = {  # half of each option's default
    name: {option: known.default / 2 for option, known in KINDS[name].options.items()}
    for name in NAMES
    if name in KINDS and KINDS[name].options
}
