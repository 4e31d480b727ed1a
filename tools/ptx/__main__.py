"""``python -m tools.ptx``: the everyday tests of kernels, which are executed as PTX. Arguments are those of pytest."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Files whose tests launch kernels; the same subject has the same name in each folder.
SUBJECTS = {
    "kernels": "batch_invariance bounds divergence_kernel planted_faults ptx real_vocabularies row_kernels row_weights",
    "ops": "divergence dpace_weights extra gradcheck gumbel_topk linear_logits linear_nll linear_sample num_active"
    " products row_objective row_stats second_order soft_embedding token_log_probs token_nll topk_divergence transform",
    "internals": "backends corruption rows",
    "corruption": "corruption corruption_levels padding sources",
    "losses": "losses", "policy": "loss", "generate": "generate",
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run pytest on the files named in ``arguments``, or on all files above, which must launch every kernel."""
    options = ["-p", "tools.ptx.plugin", "-n", "auto", "-m", "not exhaustive", *arguments]
    if not any("tests" in argument for argument in arguments):
        files = [f"tests/{folder}/test_{name}.py" for folder, names in SUBJECTS.items() for name in names.split()]
        if missing := [file for file in files if not (ROOT / file).exists()]:
            raise SystemExit(f"SUBJECTS must name existing files of tests, got {missing}")
        options += ["--every-kernel", *(str(ROOT / file) for file in files)]
    return pytest.main(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
