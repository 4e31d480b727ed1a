"""What looks at the package without running it on a GPU: its kernels' machine code, and mutants. Not in the wheel."""
