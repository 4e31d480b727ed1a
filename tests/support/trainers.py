"""Loss modules and kernels of trainers, loaded without other imports, for comparison with the package's losses.

Their losses need only torch. Their packages import model code, data generation and its clients, most of which are not
installed here. Importing the rest would take longer than all tests of a loss.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

SPECFORGE, SPECULATORS, AUTOMODEL = "specforge==0.2.0", "speculators==0.9.0", "nemo_automodel==0.7.0"
FLASH_ATTN, LIGER, TRL = "flash_attn==2.8.3.post2", "liger_kernel==0.8.5", "trl==1.16.0"
# Packages whose own __init__ is not run, and modules of which only the name is needed.
BARE = {
    "flash_attn": ("", ".ops", ".ops.triton"),
    "liger_kernel": ("", ".ops"),
    "specforge": (
        "",
        ".algorithms",
        ".algorithms.common",
        ".algorithms.eagle3",
        ".core",
        ".modeling",
        ".modeling.draft",
    ),
    "speculators": ("", ".models", ".models.dflash", ".models.dspark", ".models.eagle3", ".utils"),
    "nemo_automodel": (
        "",
        ".components",
        ".components.attention",
        ".components.loss",
        ".components.speculative",
        ".components.speculative.dflash",
        ".components.speculative.dspark",
        ".components.speculative.eagle",
        ".components.datasets",
        ".components.datasets.llm",
        ".components.models",
        ".components.models.llama",
        ".shared",
    ),
    "trl": ("", ".kernels"),
}
STAND_INS = {
    "specforge": {
        ".core.compact_teacher": {"DEFAULT_VOCAB_CHUNK_SIZE": 0, "compute_target_p_padded_from_hidden": None},
        ".distributed": {"get_draft_sp_group": None, "get_sp_ulysses_group": None},
        ".modeling.draft": {"Eagle3DraftModel": torch.nn.Module},
        ".modeling.draft.dflash": {"DFlashDraftModel": torch.nn.Module},
        ".utils": {"padding": None},
    },
    "nemo_automodel": {".components.speculative.dflash.draft_qwen3": {"Qwen3DFlashDraftModel": torch.nn.Module}},
    "speculators": {".utils.util": {"is_npu_available": lambda: False}},
}
# Stand-ins with which the draft models of AutoModel are their own: the utilities that they import.
OF_WHOLE_MODELS = {
    ".components.datasets.llm.packed_sequence": {"build_block_causal_additive_mask": None},
    ".components.models.common": {
        "initialize_rms_norm_module": lambda backend, size, eps, device=None: torch.nn.RMSNorm(size, eps),
    },
}


@contextlib.contextmanager
def loaded(trainer, *names, whole_models=False):
    """Return modules of ``SPECFORGE`` or another trainer; skip the test if it is not installed.

    ``whole_models``: with the draft models of AutoModel, which need transformers.
    """
    package, version = trainer.split("==")
    spec = importlib.util.find_spec(package)
    if spec is None or importlib.metadata.version(package) != version:
        pytest.skip(f"{trainer} is not installed")
    root = Path(spec.submodule_search_locations[0])
    ours = {}
    for name in BARE[package]:
        ours[package + name] = module = ModuleType(package + name)
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        module.__version__ = version
    for name, contents in (OF_WHOLE_MODELS if whole_models else STAND_INS.get(package, {})).items():
        ours[package + name] = module = ModuleType(package + name)
        vars(module).update(contents)
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
    for name in before:
        del sys.modules[name]
    try:
        sys.modules.update(ours)
        yield SimpleNamespace(
            **{name.rsplit(".", 1)[1]: importlib.import_module(f"{package}.{name}") for name in names}
        )
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        sys.modules.update(before)
