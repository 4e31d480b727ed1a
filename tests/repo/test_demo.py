"""The demo trains, in every mode, and its two curves agree."""

import functools
import json
import math

import pytest
import torch

from examples.demo import data, sampler, train
from examples.demo.model import LanguageModel, Size
from examples.demo.tasks import TASKS
from tests.conftest import every_time, usually
from tests.support.parity import assert_as_good_as_plain

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return a folder for the tokens, and list the files of the corpus once: that takes longer than a tiny training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "source_files", functools.cache(data.source_files))
        patch.setenv("DLLM_KERNELS_BACKEND", "torch")  # as where Triton does not interpret
        yield tmp_path_factory.mktemp("tokens")


def sizes_of_sums(options):
    """Return the sizes of the sums behind a loss and its gradients: vocabulary, hidden size, tokens."""
    return options.vocab, options.width, options.batch * options.length


def run(mode, out, cache, *more):
    argv = ["--mode", mode, "--tiny", "--steps", "10", "--device", "cpu", "--out", str(out), "--cache", str(cache)]
    status = train.main([*argv, *more])
    return status, json.loads((out / f"{mode}.json").read_text())


@pytest.mark.exhaustive
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("corruption", ["ours", "reference"])
@pytest.mark.parametrize("mode", usually(TASKS.keys() - {"block", "hybrid"}, TASKS))  # these: in the smoke run
def test_demo_trains_and_its_curves_agree(mode, corruption, tmp_path, cache, capsys):
    if corruption == "reference" and mode in ("dflash", "distill", "mtp"):
        pytest.skip("nothing is corrupted in this mode")
    status, result = run(mode, tmp_path, cache, "--corruption", corruption)
    assert status == 0
    plain, ours = result["table"]
    assert (plain["loss"], ours["loss"]) == ("reference", "ours")
    for row in (plain, ours):
        assert all(math.isfinite(value) for key, value in row.items() if key != "loss")
        assert row["heldout_last"] < row["heldout_first"]
    assert ours["peak_bytes"] <= plain["peak_bytes"]
    first = [torch.tensor(result["curves"][name]["train"][0]) for name in train.NAMES]
    sizes = sizes_of_sums(train.options_from(["--tiny", "--device", "cpu"]))
    assert_as_good_as_plain([first[1]], [first[0].double()], 0.0, mode, sizes)
    assert len(result["curves"]["ours"]["train"]) == 10
    assert (tmp_path / f"{mode}.png").read_bytes().startswith(PNG)
    assert (tmp_path / f"{mode}.txt").read_text(encoding="utf-8").strip()
    printed = capsys.readouterr().out
    *_, ratios = (line for line in printed.splitlines() if line.startswith("| "))
    assert ratios.startswith("| ours / reference")
    assert f"{ours['peak_bytes'] / plain['peak_bytes']:.2f}x" in ratios
    looked_at = printed.split("What to look at")[1].split("\n\n")[0]
    assert all(word in looked_at for word in ("the same training: ", "memory: ", f"{ours['heldout_last']:.3f}"))
    assert ("below it: it uses the context" in looked_at) == (ours["heldout_last"] < result["frequency_guess"])
    if mode == "distill":  # tokens gained per check by the target, by sampling and greedily, for each objective
        accepted = result["curves"]["accepted"]
        assert list(accepted) == ["kl", "l1", "ce"]
        for gained in accepted.values():
            assert all(1 <= tokens <= 4 for ways in gained for tokens in ways)
            assert gained[-1][0] > gained[0][0]


@pytest.mark.exhaustive
def test_a_short_training_by_minutes(tmp_path, cache, capsys):
    argv = ["--tiny", "--device", "cpu", "--minutes", "0.001", "--out", str(tmp_path), "--cache", str(cache)]
    assert train.main(argv) == 0
    assert f"{train.LEAST_STEPS} steps in about 0.001 minutes" in capsys.readouterr().out
    result = json.loads((tmp_path / "mdlm.json").read_text())
    assert len(result["curves"]["ours"]["train"]) == train.LEAST_STEPS


@pytest.mark.exhaustive
def test_corpus_holds_whole_files_out_and_has_no_mask(cache):
    corpus = data.load(512, 200_000, cache)
    train_files, held_files = data.split(data.source_files(), 200_000)
    assert train_files
    assert held_files
    assert not set(train_files) & set(held_files)
    assert corpus.mask_id not in corpus.train.tolist()


def test_attention_mask_of_the_two_copies():
    """A masked token sees clean tokens of earlier blocks and masked ones of its block.

    A clean one sees those up to itself.
    """
    model = LanguageModel(Size(8, 2, 2, 11)).double()
    noisy, clean = torch.randint(0, 11, (2, 6)), torch.randint(0, 11, (2, 6))
    blocks = torch.arange(6) // 2
    plain = model.copies(noisy, clean, blocks)
    torch.testing.assert_close(plain[:, 6:], model.hidden(clean, causal=True))
    torch.testing.assert_close(model.copies(clean, clean, torch.zeros(6))[:, :6], model.hidden(clean, causal=True))
    for at in range(6):
        for copy, ids in enumerate((noisy, clean)):
            other = ids.clone()
            other[:, at] = (other[:, at] + 1) % 11
            changed = model.copies(*((other, clean) if copy == 0 else (noisy, other)), blocks)
            moved = (changed != plain).any(-1).all(0)
            rows = torch.arange(6)
            sees_masked = (blocks == blocks[at]) & (rows >= at) if copy == 0 else blocks > blocks[at]
            sees_clean = torch.zeros(6, dtype=torch.bool) if copy == 0 else rows >= at
            assert torch.equal(moved, torch.cat([sees_masked, sees_clean]))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("mode", every_time(["mdlm", "dflash", "hybrid", "mtp"], TASKS))
def test_one_step_gives_the_same_gradients_to_rounding(mode, cache):
    """All losses use one model. Over a training run, the difference grows as rounding errors do in any training."""
    options = train.options_from(["--mode", mode, "--tiny", "--device", "cpu", "--corruption", "reference"])
    corpus = data.load(options.vocab, options.corpus_bytes, cache)
    task = TASKS[mode](options, corpus)
    if mode in train.WITH_TARGET:
        options.steps = 3
        task.prepare(train.train_target(task, corpus, options))
    batch = task.batch(data.random_windows(corpus.train, options.batch, options.length, 5), 5)
    found = {}
    for name in train.NAMES:
        model = train.new_run(task, name, 0).model.double()
        if mode in train.WITH_TARGET:
            task.target.double()
        loss, _ = train.forward_backward(task, name, model, batch)
        found[name] = [loss.total.detach(), *(p.grad for p in model.parameters())]
    for plain, ours in zip(found["reference"], found["ours"], strict=True):
        assert_as_good_as_plain([ours], [plain], 0.0, mode, sizes_of_sums(options))


def test_speculation_writes_the_tokens_of_the_target():
    def target_of(ids):  # predicts (last + 1) % 7
        return torch.nn.functional.one_hot((ids + 1) % 7, 7).float()

    def draft_of(ids):  # correct twice, then wrong
        last = int(ids[0, -1])
        return torch.tensor([(last + 1) % 7, (last + 2) % 7, (last + 5) % 7])

    ids, gained = sampler.speculate(target_of, draft_of, torch.tensor([0, 1]), 6)
    assert ids == [0, 1, 2, 3, 4, 5, 6, 0]
    assert gained == [3, 3]


REFUSED = {
    "--minutes 3 --steps 9": "argument --minutes: not allowed with --steps",
    "--steps 2.5": "argument --steps: must be an int of at least 1, got '2.5'",
    "--width 32 --heads 3": "argument --heads: must divide --width 32 into even parts, got 3",
    "--mode mtp --block-size 32": "argument --block-size: must be at most --length less 1, 31, got 32",
    "--lr nan": "argument --lr: must be a finite number above 0, got 'nan'",
    "--device nowhere": "argument --device: must be a device of torch, got 'nowhere'",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_an_invalid_argument_is_rejected_before_anything_is_read(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(["--tiny", "--device", "cpu", *arguments.split()])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert REFUSED[arguments] in printed.err
    assert not printed.out
