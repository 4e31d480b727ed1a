"""Scripts to read and to run, and the demo's training code. Not part of the wheel."""
