"""The demo trains, in every mode, and its two curves agree."""

import functools
import json
import math

import pytest
import torch

from examples.demo import data, plot, sampler, train
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
@pytest.mark.parametrize("mode", usually(["scdd", "mdlm", "distill"], TASKS))  # others: below and in the smoke run
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
        assert 0 < row["loss_share"] < 1
        assert row["tokens_per_s"] > 0
        assert row["peak_bytes"] > 0
    assert ours["peak_bytes"] <= plain["peak_bytes"]
    assert result["largest_difference_first_tenth"] <= result["largest_difference"]
    first = [torch.tensor(result["curves"][name]["train"][0]) for name in train.NAMES]
    sizes = sizes_of_sums(train.options_from(["--tiny", "--device", "cpu"]))
    assert_as_good_as_plain([first[1]], [first[0].double()], 0.0, mode, sizes)
    assert len(result["curves"]["ours"]["train"]) == 10
    assert result["curves"]["eval_steps"] == [0, 5, 10]
    assert (tmp_path / f"{mode}.png").read_bytes().startswith(PNG)
    assert (tmp_path / f"{mode}.txt").read_text(encoding="utf-8").strip()
    printed = capsys.readouterr().out
    for word in (
        "held-out, after",
        "tokens/s",
        "peak of a step",
        "loss's share",
        "written by the model",
        "million parameters",
    ):
        assert word in printed
    *_, ratios = (line for line in printed.splitlines() if line.startswith("| "))
    assert ratios.startswith("| ours / reference")
    assert f"{ours['peak_bytes'] / plain['peak_bytes']:.2f}x" in ratios
    looked_at = printed.split("What to look at")[1].split("\n\n")[0]
    for word in ("the same training: ", "the model learns: ", "memory: ", "time: ", f"{ours['heldout_last']:.3f}"):
        assert word in looked_at
    assert ("below it: it uses the context" in looked_at) == (ours["heldout_last"] < result["frequency_guess"])
    assert ("masked tokens of held-out text" in printed) == (mode in ("mdlm", "block", "hybrid", "scdd"))
    if mode == "distill":
        compare_drafts(result["curves"]["accepted"], printed)


def compare_drafts(accepted, printed):
    """Check the number of tokens gained per check by the target, which training increases. Sampling gives fractions."""
    assert list(accepted) == ["kl", "l1", "ce"]
    for gained in accepted.values():
        assert len(gained) == 3
        assert all(1 <= tokens <= 4 for ways in gained for tokens in ways)
        assert gained[-1][0] > gained[0][0]
    last = f"kl {accepted['kl'][-1][0]:.2f} by sampling, {accepted['kl'][-1][1]:.2f} greedily; l1 "
    assert f"tokens for each check by the target, held-out text: {last}" in printed


def test_correctly_filled_tokens_are_counted():
    windows = torch.randint(6, 11, (4, 400))
    right = torch.rand(4, 400) < 0.6

    class Words:
        mask_id = 2

        def log_unigram(self):
            return torch.nn.functional.one_hot(torch.tensor(7), 11).float()

        def decode(self, ids, mask="?"):
            return "".join(mask if token == 2 else str(token % 10) for token in ids)

    task = TASKS["mdlm"].__new__(TASKS["mdlm"])
    task.options, task.corpus = train.options_from(["--tiny", "--device", "cpu"]), Words()
    calls = iter(range(4))
    task.options.batch = 1

    def logits_of(_, ids):
        row = next(calls)
        predicted = torch.where(right[row], windows[row], 5)
        return (torch.nn.functional.one_hot(predicted, 11).float() + 2.0 * (torch.arange(11) == 2))[None]

    task._logits = logits_of
    filled = task.fill(None, windows)
    masked = [i for i, letter in enumerate(filled.given) if letter == "?"]
    assert 0.25 < len(masked) / 400 < 0.35
    assert all(a == b for i, (a, b) in enumerate(zip(filled.given, filled.text, strict=True)) if i not in masked)
    assert [filled.text[i] == "\N{DARK SHADE}" for i in masked] == (~right[2][masked]).tolist()
    assert 0.5 < filled.right < 0.7
    assert 0.15 < filled.frequent < 0.25
    assert 0.25 < filled.tokens / 1600 < 0.35


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", usually(["distill"], TASKS))  # it has the models of the others, and more objectives
def test_minutes_determine_the_number_of_steps(mode, tmp_path, cache, monkeypatch):
    """On a fake clock, each training step takes an eighth of a second, and everything else no time."""
    clock = [0.0]
    monkeypatch.setattr(train, "_now", lambda device: clock[0])
    step = train.optimizer_step

    def slow(*args):
        clock[0] += 0.125  # a power of two, so that the sums are exact
        step(*args)

    monkeypatch.setattr(train, "optimizer_step", slow)
    options = train.options_from(["--mode", mode, "--tiny", "--device", "cpu", "--minutes", "0.1"])
    corpus = data.load(options.vocab, options.corpus_bytes, cache)
    steps = train.steps_within(TASKS[mode](options, corpus), corpus, options)
    models = len(train.NAMES) + len(TASKS[mode].objectives.keys() - {"ours"}) + (mode in train.WITH_TARGET)
    assert steps == max(int(6 / (0.125 * models)), train.LEAST_STEPS)
    options.minutes = 1e-3
    assert train.steps_within(TASKS[mode](options, corpus), corpus, options) == train.LEAST_STEPS


@pytest.mark.exhaustive
def test_a_short_training_by_minutes(tmp_path, cache, capsys):
    argv = ["--tiny", "--device", "cpu", "--minutes", "0.001", "--out", str(tmp_path), "--cache", str(cache)]
    assert train.main(argv) == 0
    assert f"{train.LEAST_STEPS} steps in about 0.001 minutes" in capsys.readouterr().out
    result = json.loads((tmp_path / "mdlm.json").read_text())
    assert len(result["curves"]["ours"]["train"]) == train.LEAST_STEPS


def test_the_help_names_the_title_and_the_source_of_each_mode(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for mode, task in TASKS.items():
        assert task.source
        assert f"{mode}: {task.title} ({task.source})" in text


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


@pytest.mark.exhaustive
def test_cutting_the_graph_at_the_loss_changes_no_gradient(cache):
    options = train.options_from(["--tiny", "--device", "cpu", "--corruption", "reference"])
    corpus = data.load(options.vocab, options.corpus_bytes, cache)
    task = TASKS["mdlm"](options, corpus)
    batch = task.batch(data.random_windows(corpus.train, 2, options.length, 0), 0)
    cut, whole = (train.new_run(task, "reference", 0).model for _ in range(2))
    train.forward_backward(task, "reference", cut, batch)
    task.reference(task.outputs(whole, batch), batch).total.backward()
    for a, b in zip(cut.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.exhaustive
def test_corpus_holds_whole_files_out_and_comes_from_the_cache(cache):
    first = data.load(512, 200_000, cache)
    again = data.load(512, 200_000, cache)
    assert torch.equal(first.train, again.train)
    assert first.vocab_size == 512
    train_files, held_files = data.split(data.source_files(), 200_000)
    assert train_files
    assert held_files
    assert not set(train_files) & set(held_files)
    text = held_files[0].read_text(encoding="utf-8", errors="replace")
    assert first.decode(first.tokenizer.encode(text).ids) == text
    assert first.mask_id not in first.train.tolist()
    assert first.decode([first.mask_id, *first.tokenizer.encode("a").ids, first.mask_id], mask="?") == "?a?"


def test_default_vocabulary_and_corpus_are_real():
    options = train.options_from(["--device", "cpu"])
    assert options.vocab >= 8192
    assert options.corpus_bytes >= 1_000_000


class WithLogits(torch.nn.Module):
    """A model with these logits."""

    def __init__(self, logits_of, V):
        super().__init__()
        self.logits_of, self.lm_head = logits_of, torch.nn.Linear(V, V, bias=False)
        torch.nn.init.eye_(self.lm_head.weight)

    def forward(self, ids):
        return self.lm_head(self.logits_of(ids))


def test_denoising_keeps_the_most_confident_and_finishes_each_block_first():
    V, mask = 5, 4

    def logits_of(ids):  # position i predicts token i % 4, with more confidence the later it is in its block
        i = torch.arange(ids.shape[1])
        sure = 1.0 + (i % 3).float()
        return (torch.nn.functional.one_hot(i % 4, V) * sure[:, None])[None]

    trace = sampler.denoise(WithLogits(logits_of, V), torch.tensor([0, 1, 2]), 6, mask, block_size=3, steps=3)
    assert trace[0] == [0, 1, 2, 4, 4, 4, 4, 4, 4]
    assert trace[1] == [0, 1, 2, 4, 4, 1, 4, 4, 4]
    assert trace[2] == [0, 1, 2, 4, 0, 1, 4, 4, 4]
    assert trace[3] == [0, 1, 2, 3, 0, 1, 4, 4, 4]
    assert trace[-1] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_denoising_in_fewer_steps_fills_several_a_step_and_never_writes_the_mask():
    def logits_of(ids):
        logits = torch.zeros(1, ids.shape[1], 3)
        logits[..., 2] = 9.0  # the mask is the most likely token
        return logits

    trace = sampler.denoise(WithLogits(logits_of, 3), torch.tensor([0]), 4, 2, block_size=4, steps=2)
    assert [ids.count(2) for ids in trace] == [4, 2, 0]


def test_speculation_writes_the_tokens_of_the_target():
    def target_of(ids):  # predicts (last + 1) % 7
        return torch.nn.functional.one_hot((ids + 1) % 7, 7).float()

    def draft_of(ids):  # correct twice, then wrong
        last = int(ids[0, -1])
        return torch.tensor([(last + 1) % 7, (last + 2) % 7, (last + 5) % 7])

    ids, gained = sampler.speculate(target_of, draft_of, torch.tensor([0, 1]), 6)
    assert ids == [0, 1, 2, 3, 4, 5, 6, 0]
    assert gained == [3, 3]


def test_smoothing_is_a_running_mean():
    assert plot.smoothed([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


def test_learning_rate_warms_up_and_decays():
    rates = [train.rate(step, 100, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 94 / 95)))  # a step before the tenth


REFUSED = {
    "--minutes 0": "argument --minutes: must be a finite number above 0, got '0'",
    "--minutes 3 --steps 9": "argument --minutes: not allowed with --steps",
    "--steps 0": "argument --steps: must be an int of at least 1, got '0'",
    "--steps -3": "argument --steps: must be an int of at least 1, got '-3'",
    "--steps 2.5": "argument --steps: must be an int of at least 1, got '2.5'",
    "--batch 0": "argument --batch: must be an int of at least 1, got '0'",
    "--length 1": "argument --length: must be an int of at least 2, got '1'",
    "--width 0": "argument --width: must be an int of at least 1",
    "--layers 0": "argument --layers: must be an int of at least 1",
    "--heads 0": "argument --heads: must be an int of at least 1",
    "--width 32 --heads 3": "argument --heads: must divide --width 32 into even parts, got 3",
    "--width 6 --heads 2": "argument --heads: must divide --width 6 into even parts, got 2",
    "--vocab 100": "argument --vocab: must be an int of at least 258, got '100'",
    "--corpus-bytes 0": "argument --corpus-bytes: must be an int of at least 1",
    "--evals 0": "argument --evals: must be an int of at least 1",
    "--heldout 0": "argument --heldout: must be an int of at least 1",
    "--block-size 0": "argument --block-size: must be an int of at least 1",
    "--block-size 33": "argument --block-size: must be at most --length 32, got 33",
    "--mode mtp --block-size 32": "argument --block-size: must be at most --length less 1, 31, got 32",
    "--draft-block 1": "argument --draft-block: must be an int of at least 2, got '1'",
    "--mode dflash --draft-block 32": "argument --draft-block: must be at most --length less 1, 31, got 32",
    "--blocks 0": "argument --blocks: must be an int of at least 1",
    "--lr 0": "argument --lr: must be a finite number above 0, got '0'",
    "--lr nan": "argument --lr: must be a finite number above 0, got 'nan'",
    "--alpha inf": "argument --alpha: must be a finite number of at least 0, got 'inf'",
    "--temperature -1": "argument --temperature: must be a finite number of at least 0, got '-1'",
    "--temperature hot": "argument --temperature: must be a finite number of at least 0, got 'hot'",
    "--threads 0": "argument --threads: must be an int of at least 1, got '0'",
    "--seed -1": "argument --seed: must be an int of at least 0",
    f"--seed {2**40}": "argument --seed: must be less than 2**32, got 1099511627776",
    "--device nowhere": "argument --device: must be a device of torch, got 'nowhere'",
}


if not torch.cuda.is_available():
    REFUSED["--device cuda"] = "argument --device: must be a device that is here, got 'cuda'"


@pytest.mark.parametrize("arguments", REFUSED)
def test_an_invalid_argument_is_rejected_before_anything_is_read(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(["--tiny", "--device", "cpu", *arguments.split()])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert REFUSED[arguments] in printed.err
    assert not printed.out


def test_a_text_shorter_than_the_windows_is_rejected(tmp_path, cache, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("mdlm", tmp_path, cache, "--corpus-bytes", "1")
    assert stopped.value.code == 2
    assert "argument --corpus-bytes: must give texts longer than --length 32 tokens, got " in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", usually(["idlm", "dflash", "mtp"], TASKS))
def test_the_smallest_accepted_sizes_run(mode, tmp_path, cache):
    last = mode in ("idlm", "mtp", *train.WITH_TARGET)
    least = {"steps": 1, "batch": 1, "length": 3, "width": 2, "layers": 1, "heads": 1, "vocab": 258, "evals": 1}
    least |= {"heldout": 1, "block-size": 2 if last else 3, "draft-block": 2, "blocks": 1, "temperature": 0, "alpha": 0}
    status, result = run(mode, tmp_path, cache, *(str(x) for k, v in least.items() for x in (f"--{k}", v)))
    assert status == 0
    assert len(result["curves"]["ours"]["train"]) == 1


@pytest.mark.exhaustive
def test_a_training_that_diverges_is_still_reported(tmp_path, cache, capsys):
    status, result = run("mdlm", tmp_path, cache, "--lr", "1e30", "--steps", "12")
    assert status == 1
    assert not math.isfinite(result["table"][1]["heldout_last"])
    assert math.isnan(result["largest_difference"])
    assert "nan over all steps" in capsys.readouterr().out
