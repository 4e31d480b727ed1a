"""What looks at the package without running it on a GPU: its kernels' machine code, and mutants of it. Not in the wheel."""
