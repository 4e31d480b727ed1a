"""One ``RoutineCase`` per corruption routine and set of options: everything that tests need to know about it.

The comparison with the oracle, the laws, and the tests of sources, padding, statistics, launches, bounds, masks, graphs
and errors run over these cases. Nothing else in the tests lists the routines.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

import reference.corruption
from dllm_kernels import corruption
from tests.support.uniforms import draws

MASK, V = 126_336, 126_464
# The row of the results that are worked out by hand. Its draws, rounded:
#   level of each part                  0.587689  0.232711
#   coin of each position               0.988   0.693   0.144   0.338   0.441   0.631   0.524   0.831
#   coin, if tokens are drawn           0.693   0.338   0.631   0.831   0.428   0.979   0.542   0.135
#   index of a token over their number  0.621   0.342   0.774   0.509   0.003   0.457   0.042   0.360
#   Gumbel noise of the coin            4.415   1.004  -0.661  -0.081   0.199   0.777   0.438   1.683
HAND_SEED, HAND_MASK, HAND_V = 1273, 3, 10
HAND_IDS, HAND_LOSS_MASK = [0, 1, 2, 4, 5, 6, 7, HAND_MASK], [1, 1, 1, 1, 0, 1, 1, 1]
Tensors = dict[str, torch.Tensor]


def batch(B, L, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (B, L), generator=g)
    loss_mask = torch.rand(B, L, generator=g) < 0.7
    return ids.to(device), loss_mask.to(device), torch.randint(-(2**62), 2**62, (B,), generator=g).to(device)


def seed_of_a_call(generator):
    """Draw the seed of a call; guaranteed to stored states of generators."""
    return int(torch.randint(-(2**63), 2**63 - 1, (), generator=generator))


def no_inputs(ids):
    return {}


@dataclass(frozen=True, eq=False)
class RoutineCase:
    """Description of a corruption routine with its options, called as ``(ids, loss_mask, **source of the draws)``.

    What the tests can read from the signature is not repeated here: whether ``loss_mask`` may be None, whether there is
    a level, and whether corrupted positions become MASK (no ``vocab_size``), other tokens (no ``mask_token_id``), or
    either.

    Attributes:
        routine: name of the function, here and in the oracle.
        options: arguments by name.
        inputs: ids -> further tensor arguments by name, computed on the CPU, those of a row from its ids alone. A level
            of each part has several columns, ``segment_ids`` the shape of the ids, any other argument an entry per row.
        cdf: distribution of a drawn level above ``eps``: ``(level - eps) / (1 - eps)`` -> its cumulative probability.
        rate: arguments -> probability with which a position is corrupted; None: ``p_mask``, which holds the level.
        factor: length of a row -> float32 factors of its positions, with which ``p_mask`` is the level; None: 1.
        number: (levels, sizes of the parts) -> number of corrupted positions of each part; None: each position is
            corrupted by itself.
        of_supervised: whether the number is a share of the supervised positions, not of all of them.
        one_launch: whether a call on a GPU is one kernel launch and nothing else.
        examples: results that were worked out by hand, see ``by_hand``; at least one per routine.
        stored: noise of 32 positions under the seed 12345 as hexadecimal bits, the first position highest. Frozen: a
            change breaks every run that stored a seed.
        tokens: values of ``mask_token_id`` and ``vocab_size``, for routines with these arguments.
    """

    routine: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[torch.Tensor], Tensors] = no_inputs
    cdf: Callable[[torch.Tensor], torch.Tensor] = lambda t: t
    rate: Callable[[dict[str, Any]], Any] | None = None
    factor: Callable[[int], torch.Tensor] | None = None
    number: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    of_supervised: bool = False
    one_launch: bool = True
    examples: tuple["Example", ...] = ()
    stored: str = ""
    tokens: Mapping[str, int] = field(default_factory=lambda: {"mask_token_id": MASK, "vocab_size": V})

    @property
    def parameters(self):
        return inspect.signature(getattr(corruption, self.routine)).parameters

    @property
    def floats(self):
        """Return the names of the float arguments."""
        return [name for name, p in self.parameters.items() if p.annotation == "float"]

    @property
    def takes_no_mask(self):
        return "None" in self.parameters["loss_mask"].annotation

    @property
    def masks(self):
        """Return whether every corrupted position becomes MASK."""
        return "vocab_size" not in self.parameters

    def constants(self):
        return {name: n for name, n in self.tokens.items() if name in self.parameters} | dict(self.options)

    def inputs_on(self, ids):
        return {name: t.to(ids.device) for name, t in self.inputs(ids).items()}

    def launch(self, ids, mask, **arguments):
        return getattr(corruption, self.routine)(ids, mask, **self.constants() | arguments)

    def __call__(self, ids, mask, **arguments):
        """Return three outputs, the probabilities as ones if the routine returns none."""
        return three(self.launch(ids, mask, **self.inputs_on(ids) | arguments))

    def oracle(self, ids, mask, seeds):
        """Compute the outputs of the oracle, on the CPU, for one seed per row or an int, the seed of the batch."""
        function, L = getattr(reference.corruption, self.routine), ids.shape[1]
        names, given = inspect.signature(function).parameters, self.constants() | self.inputs(ids)
        size = 1 if "segment_ids" in given else given.get("block_size") or L
        drawn = draws(seeds, len(ids), -(-L // min(size, L)), L, "tokens" in names)
        of = {"t_uniform": drawn.levels, "m_uniform": drawn.levels, "uniform": drawn.coins}
        if self.number:
            of["uniform"] = drawn.fine
        if "tokens" in names:
            of["tokens"] = drawn.token(given["vocab_size"] - 2 * ("mask_token_id" in names))
        return three(function(ids, mask, **given, **{name: t for name, t in of.items() if name in names}))

    def of_example(self, example):
        """Return the case with the arguments of an example."""
        tensors = {name: torch.tensor([value]) for name, value in example.given.items() if isinstance(value, list)}
        options = {name: value for name, value in example.given.items() if name not in tensors}
        inputs, tokens = lambda ids: self.inputs(ids) | tensors, {"mask_token_id": HAND_MASK, "vocab_size": HAND_V}
        return replace(self, options={**self.options, **options}, inputs=inputs, tokens=tokens)

    def of_positions(self, levels):
        """Return the ``p_mask`` of the level ``[B, L]`` of each position."""
        return levels if self.factor is None else levels * self.factor(levels.shape[1]).to(levels)

    def columns(self, L):
        """Return the number of levels of a row: one, or one per block, or one per possible segment."""
        if "segment_ids" in self.inputs(torch.zeros(1, 1, dtype=torch.int64)):
            return L
        return -(-L // (self.options.get("block_size") or max(L, 1)))

    def of_row(self, inputs, b, first, L):
        """Return the tensor arguments of row b of length L alone, from its column ``first`` on."""
        rows = {name: t[b : b + 1] for name, t in inputs.items()}
        for name, t in rows.items():
            if name == "segment_ids":
                rows[name] = t[:, first:]
            elif t.dim() == 2 and t.shape[1] > 1:
                rows[name] = t[:, : self.columns(L - first)]
        return rows

    def parts(self, ids):
        """Return the number of the part of each position, int64 ``[B, L]``; -1: in none."""
        B, L = ids.shape
        if "segment_ids" not in (inputs := self.inputs(ids)):
            blocks = reference.corruption.blocks_of(L, self.options.get("block_size"))
            return torch.tensor([n for n, block in enumerate(blocks) for _ in block]).expand(B, L)
        numbers = [list(dict.fromkeys(i for i in row if i >= 0)) for row in inputs["segment_ids"].tolist()]
        rows = zip(inputs["segment_ids"].tolist(), numbers, strict=True)
        return torch.tensor([[known.index(i) if i >= 0 else -1 for i in row] for row, known in rows])


def three(out):
    return out if len(out) == 3 else (*out, torch.ones(out[0].shape, dtype=torch.float32, device=out[0].device))


def make_levels(ids, block_size=None):
    """Return levels per row, or per block, including 0 and 1 if there are enough of them.

    The levels of a row do not depend on its batch. They are computed on the CPU, because a GPU replaces a division by a
    constant by a product with its reciprocal, which changes the last bit.
    """
    n = 1 if block_size is None else max(-(-ids.shape[1] // block_size), 1)
    first = ((ids.cpu().sum(1, keepdim=True) + 4) % 11).float() / 10
    return ((first + torch.arange(n, device="cpu") * 0.3) % 1.1).clamp(max=1)


def row_levels(ids):
    return {"level": make_levels(ids)}


def block_levels(ids):
    return {"level": make_levels(ids, 6)}


def mix_probabilities(ids):
    return {"mask_prob": make_levels(ids)[:, 0] / 2, "uniform_prob": 0.5 - make_levels(ids) / 3}


def documents(ids):
    """Return segment ids: runs, ids that occur again later, and positions in no segment."""
    return {"segment_ids": (ids // 7 + 1) % 5 - 1}


class Example(NamedTuple):
    """New token of each corrupted position of ``HAND_IDS``, ``p_mask``, and arguments besides those of the case."""

    changed: dict[int, int]
    p: float | list[float]
    given: dict[str, Any]


def by_hand(changed, p, **given):
    """Return an example; ``changed`` may list positions that become MASK, tensors are lists of the values of a row."""
    return Example(changed if isinstance(changed, dict) else dict.fromkeys(changed, HAND_MASK), p, given)


def row_by_hand(dtype, mask_dtype):
    """Return ids, mask and seeds of the examples."""
    ids, mask = torch.tensor([HAND_IDS], dtype=dtype), torch.tensor([HAND_LOSS_MASK], dtype=mask_dtype)
    return ids, mask, torch.tensor([HAND_SEED])


def rounded(at_least):
    """Return the function of the number of positions that is a rounded share, with this minimum in a part."""
    return lambda levels, sizes: torch.minimum((levels * sizes).round().long().clamp(min=at_least(levels)), sizes)


def uniform(inputs=no_inputs, **options):
    exact = {"number": rounded(lambda m: (m > 0).long()), "of_supervised": True} if options.get("exact") else {}
    return RoutineCase("corrupt_uniform", options, inputs, **exact)


def blockwise(block_size=None, inputs=no_inputs, **options):
    number = rounded(lambda m: int(block_size is None))
    return RoutineCase("corrupt_blockwise", {"block_size": block_size, **options}, inputs, number=number)


def tokens(block_size=None, inputs=no_inputs, n=V, **options):
    """Return a case of random tokens, one of n, whose ``p_mask`` is not the probability unless a level is passed."""
    rate = (lambda given: (1 + given.get("eps", 1e-3)) / 2) if inputs is no_inputs else None
    options = {"block_size": block_size, **options}
    return RoutineCase("corrupt_uniform_random", options, inputs, rate=rate, tokens={"vocab_size": n})


def mix_rate(given):
    return given["mask_prob"].reshape(-1, 1) + given["uniform_prob"].reshape(-1, 1)


def stored(noise, case, *examples, **changed):
    return replace(case, stored=noise, examples=examples, **changed)


ROUTINES = {
    "uniform": stored("ffedbfff", uniform(), by_hand([2, 3, 5, 6], 0.670151, eps=0.2)),
    "uniform, block 7": stored(
        "fe093dc0",
        uniform(block_size=7),
        by_hand([1, 2, 3, 6], [0.752614] * 5 + [0.539627] * 3, eps=0.4, block_size=5),
    ),
    "sequence": stored(
        "bff7d3bf",
        blockwise(),
        by_hand([0, 1, 5, 6, 7], 0.670151, eps=0.2),  # round(0.67 * 8) = 5
        by_hand([0, 1, 5, 6, 7], 0.75, level=[0.75]),  # 6, one of which is not supervised
        by_hand([0], 0.0, level=[0.0]),  # at least 1
        # The last position gains 7 * 7/8 ln 2 / (8 ratio), and lacks 4.415 - 1.683 = 2.731: the ratio is 0.1943.
        by_hand([7], 0.125, level=[0.125], half_life_ratio=0.194),
        by_hand([0], 0.125, level=[0.125], half_life_ratio=0.195),
    ),
    "block 1": stored("8650be54", blockwise(1)),
    "block 5": stored(
        "b852407d",
        blockwise(5),
        by_hand([0, 1, 7], [0.670151] * 5 + [0.386169] * 3, eps=0.2),  # 3, one of which is not supervised, and 1 of 3
        by_hand([5, 6, 7], [0.0] * 5 + [1.0] * 3, level=[0.0, 1.0]),
    ),
    "block 32": stored(
        "bff7d3bf",
        blockwise(32),
        by_hand([7], 0.125, level=[0.125], half_life_ratio=0.0485),  # as in "sequence", with 32 instead of 8
        by_hand([0], 0.125, level=[0.125], half_life_ratio=0.0487),
    ),
    "steep": stored("3f010f03", blockwise(8, eps=0.0, half_life_ratio=1e-3)),
    "tokens": stored("fb7ffff7", tokens(), by_hand({1: 3, 6: 0, 7: 3}, 1.0)),
    "tokens, block 1": stored("877bbfc4", tokens(1)),
    "tokens, block 6": stored("f93fcd83", tokens(6, eps=0.2), by_hand({1: 3, 2: 7, 7: 3}, 1.0, block_size=5)),
    "exact": stored("bff7d3bf", uniform(exact=True), by_hand([0, 1, 5, 6, 7], 0.670151, eps=0.2)),
    # A level that is equal to the coin of position 6: the coin is not below it. So are a level of "token levels" and a
    # probability of "mix".
    "levels": stored("40292fe7", uniform(row_levels), by_hand([2, 3], 0.524474, level=[0.5244737267494202], eps=0.9)),
    "levels, block 6": stored("43afece7", uniform(block_levels, block_size=6)),
    "exact levels": stored(
        "b656c018",
        uniform(row_levels, exact=True),
        by_hand([], 0.0, level=[0.0]),
        by_hand([0], 0.01, level=[0.01]),  # at least 1
        by_hand([0, 1, 5, 7], 0.5, level=[0.5]),  # round(0.5 * 7) = 4
    ),
    "sequence levels": stored("1656501b", blockwise(None, row_levels)),
    "block levels": stored("16dfc11f", blockwise(6, block_levels)),
    "token levels": stored(
        "837fc1c7",
        tokens(6, block_levels),
        by_hand({1: 3, 7: 3}, [0.34] * 5 + [0.541585] * 3, block_size=5, level=[0.34, 0.5415850281715393], eps=0.9),
    ),
    "mix": stored(
        "917bddc7",
        RoutineCase("corrupt_mix", inputs=mix_probabilities, rate=mix_rate),
        by_hand({1: HAND_MASK, 2: 8, 6: 0, 7: HAND_MASK}, 1.0, mask_prob=[0.34], uniform_prob=[0.3]),
        # Position 7 would become another token, but its clean token is MASK.
        by_hand({1: 4}, 1.0, mask_prob=[0.13543826341629028], uniform_prob=[0.3]),
    ),
    "all masked": stored("ffffffff", RoutineCase("corrupt_all_masked"), by_hand([0, 1, 2, 3, 5, 6, 7], 1.0)),
    "segments": stored(
        "c02daca5",
        uniform(documents),
        by_hand(
            [1, 2, 3, 5, 6],
            [1.0, 0.752614, 0.752614, 0.539627, 0.539627, 0.752614, 0.539627, 0.539627],
            eps=0.4,
            segment_ids=[-1, 7, 7, 0, 0, 7, 0, 0],
        ),
        one_launch=False,
    ),
    "segment levels": stored(
        "69292d25",
        uniform(lambda ids: documents(ids) | {"level": make_levels(ids, 1)}),
        by_hand(
            [2, 5, 7],
            [1.0, 0.5, 0.5, 0.0, 0.5, 1.0, 0.5, 1.0],
            segment_ids=[-1, 9, 9, 4, 9, 5, 9, 5],
            level=[0.5, 0.0, 1.0, 0.25, 0.25, 0.25, 0.25, 0.25],
        ),
        one_launch=False,
    ),
}
FIRSTS = {case.routine: case for case in reversed(ROUTINES.values())}  # the first case of each routine
ENDS = {
    "levels of 0 and 1": lambda ids: {"level": (torch.arange(len(ids)) % 2).float()},
    "a level near 0": lambda ids: {"level": torch.full((len(ids),), 0.01)},
}
# More options, for comparisons with the oracle and of code paths. The levels of ``ENDS`` depend on the batch.
MORE = ROUTINES | {
    "eps": uniform(eps=0.05, exact=True),
    "one level per row": uniform(lambda ids: {"level": make_levels(ids)[:, 0]}, block_size=7),
    "segments, eps": uniform(documents, eps=0.05),
    "a block beyond the row": blockwise(10_000, eps=0.5, half_life_ratio=0.05),
    "flat": blockwise(4, eps=0.0, half_life_ratio=1.0),
    "flat row": blockwise(half_life_ratio=1e30),
    "level of blocks": blockwise(7, row_levels),
    "tokens beyond the row": tokens(10_000),
    **{f"{n} tokens": tokens(6, n=n) for n in (1, 7, 2**22, 2**22 + 1, 2**31)},
    **{f"exact, {name}": uniform(level, exact=True) for name, level in ENDS.items()},
    **{f"blocks, {name}": blockwise(8, level) for name, level in ENDS.items()},
    "sequence, a level of 0": blockwise(None, ENDS["levels of 0 and 1"]),
    "tokens, levels of 0 and 1": tokens(8, ENDS["levels of 0 and 1"]),
    "eps of 1": uniform(eps=1, exact=True),
    "eps of 1, blocks": blockwise(7, eps=1.0),
    "eps of 1, tokens": tokens(7, eps=1),
}
# The functions of the module that corrupt nothing, as functions of the same arguments.
OTHERS = {
    "complementary": lambda ids, mask, seeds=None, **o: corruption.complementary(mask, ids > V // 2, **o),
    "sample_level": lambda ids, mask, **o: corruption.sample_level(len(ids), method="stratified", high=0.9, **o),
    "gumbel_topk": lambda ids, mask, seeds=None, **o: corruption.gumbel_topk(
        mask[0].float(), ids[0, 0] % 5, uniform=(ids[0] % 97 + 0.5) / 97, **o
    ),
    "batched_gumbel_topk": lambda ids, mask, **o: corruption.batched_gumbel_topk(mask.float(), ids[:, 0] % 5, **o),
}
