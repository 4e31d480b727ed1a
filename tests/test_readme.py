import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_run_as_printed():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    code = "\n".join(block for block in blocks if "nemo_automodel" not in block and "transformers" not in block)
    assert "forward_fused" in code
    assert "weighted_linear_nll" in code
    names = {}
    exec(compile(code, str(README), "exec"), names)
    assert names["loss"].isfinite()
    assert names["hidden"].grad.isfinite().all()
    assert names["head"].grad.abs().sum() > 0


def test_the_two_commands_are_make_targets():
    targets = (README.parent / "Makefile").read_text()
    for command in re.findall(r"^make (\w+)", README.read_text(), re.MULTILINE):
        assert re.search(rf"^{command}:", targets, re.MULTILINE), command
