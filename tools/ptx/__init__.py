"""Executes compiled kernels without a GPU: the PTX that Triton compiles for sm_90, on NumPy arrays of all threads.

``driver`` hands every launch to ``threads.launch``. ``parse`` splits the PTX into basic blocks, ``translate`` turns
each block into a Python function, and ``arithmetic`` defines what the instructions compute. ``memory`` checks every
access. ``plugin`` runs the tests of the package this way: ``python -m tools.ptx``. docs/develop/executed-kernels.md
lists what is found and what is not.
"""
