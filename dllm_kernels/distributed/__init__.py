"""The losses on many processes: sharded heads (FSDP2), sharded vocabularies (TP), global counts.

The only part of the package that imports ``torch.distributed``; ``ops`` loads it when it meets a DTensor.
"""

from dllm_kernels.distributed.reduce import global_token_count, summed_over

__all__ = ["global_token_count", "summed_over"]
