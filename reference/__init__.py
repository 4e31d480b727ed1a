"""Pure PyTorch oracle of every documented routine: the plainest code, straight from the equations.

Imports torch and the standard library, and nothing of ``dllm_kernels``: an oracle that shares code with what it
judges is no oracle.
"""
