"""Analysis of the package without running it on a GPU: machine code of the kernels, and mutants. Not in the wheel."""
