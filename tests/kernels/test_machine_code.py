"""Instruction counts: listings short enough to count by hand, and the roofs derived from them."""

import pytest

from tools import machine_code
from tools.inspect_kernels import _clocks_a_turn, _phases, _roof, main


def listing(*lines):
    """Format instructions as the disassembler prints them: 16 bytes each, addresses from 0."""
    code = "\n".join(f"        /*{16 * i:04x}*/   {line} ;     /* 0x000000ff */" for i, line in enumerate(lines))
    return machine_code.parse("  .headerflags @1\n" + code + "\n        /* 0x0123 */\n")


WAITING = [
    "MOV R2, RZ",
    "LDG.E.EF.128 R8, desc[UR6][R4.64]",  # the loop begins
    "FADD R1, R8, R1",
    "LDG.E.EF.128 R12, desc[UR6][R4.64+0x10]",
    "FMNMX R1, R15, R1, !PT",
    "ISETP.GE.AND P0, PT, R2, 0x7, PT",
    "@!P0 BRA 0x10",
    "STG.E [R4.64], R1",
    "EXIT",
]
TOGETHER = [*(f"LDG.E.128 R{4 * i}, desc[UR6][R40.64]" for i in range(1, 5)), "FADD R1, R18, R1", "@P0 BRA 0x0", "EXIT"]
NEXT_ITERATION = ["FADD R1, R8, R1", "LDG.E.128 R8, [R4.64]", "FADD R2, R3, R3", "@P0 BRA 0x0"]
NESTED = ["MOV R1, R1", "LDG.E R2, [R4.64]", "@P0 BRA 0x10", "MOV R3, R3", "@P1 BRA 0x0", "EXIT"]
RARE = [
    "LDG.E.128 R4, [R2.64]",
    "@!P1 BRA 0x50",  # unless the tile holds the id
    "LDG.E R8, [R10.64]",
    "MUFU.EX2 R8, R8",
    "FADD R4, R8, R4",
    "STG.E.128 [R2.64], R4",
    "@P0 BRA 0x0",
    "EXIT",
]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (WAITING, {"slots": 6, "alu_slots": 2, "load_width": 16, "loaded": 32, "in_flight": 1, "waits": 2}),
        (TOGETHER, {"in_flight": 4, "waits": 1, "loaded": 64}),
        (NEXT_ITERATION, {"in_flight": 1, "waits": 1}),
        (NESTED, {"slots": 2}),  # only the inner loop is a pass
        (RARE, {"slots": 4, "rare_slots": 3, "xu_slots": 0, "loaded": 16, "stored": 16}),  # what is skipped is apart
    ],
)
def test_the_cost_of_a_loop(code, expected):
    (cost,) = machine_code.passes(listing(*code))
    assert {name: getattr(cost, name) for name in expected} == expected


def test_code_outside_of_loops_over_memory():
    assert machine_code.tail(listing(*WAITING)) == 3
    assert machine_code.tail(listing("LDG.E R1, [R2.64]", "STG.E [R2.64], R1", "EXIT")) == 3  # a merge is only a tail
    path = listing("ISETP.NE.AND P0, PT, R1, RZ, PT", "@P0 BRA 0x40", "LDG.E.128 R4, [R2.64]", "EXIT", "EXIT")
    cost = machine_code.whole(path)
    assert (cost.slots, cost.loaded) == (4, 16)
    draws = listing("MOV R5, R6", "@P0 BRA 0x0", "IMAD.WIDE.U32 R1, R2, R3, R4", "IMAD R5, R6, R7, R8", "@P0 BRA 0x20")
    assert machine_code.slots_of_products(draws) == 3  # the loop with the most products


def cost(slots=100, alu=10, loads=4, waits=1, stored=0, xu=0, rare=0):
    return machine_code.Cost(slots, alu, xu, rare, 16, 16 * loads, stored, loads, waits)


@pytest.mark.parametrize(
    ("pass_", "warps", "bound"),
    [
        (cost(), 64, "memory"),
        (cost(slots=1000), 64, "issue"),
        (cost(slots=600, alu=400), 64, "ALU"),
        (cost(slots=400, xu=64), 64, "MUFU"),
        (cost(), 8, "latency"),
    ],
)
def test_the_lowest_roof_is_the_bound(pass_, warps, bound):
    assert _roof(pass_, "H200", warps).bound == bound


def test_roofs_by_hand():
    # 32 bytes: 16 elements at 14.39 slots each in the time that a copy takes.
    roof = _roof(cost(slots=460, alu=230, loads=2), "H200", 64)
    assert roof.issue == pytest.approx(0.5, abs=2e-3)
    assert roof.alu == pytest.approx(0.5, abs=2e-3)
    # 64 warps of 32 lanes bring 64 KiB in 720 ns of waiting and 460 clocks of 1.83 GHz: 67.5 GB/s for each of 132.
    assert roof.latency * 4.3e12 / 132 == pytest.approx(64 * 32 * 32 / (720e-9 + 460 / 1.83e9), rel=1e-6)
    # A single warp takes 40 clocks, 10 of them at each of the two queues. A second warp finds each queue busy for a
    # quarter of the time.
    assert _clocks_a_turn(issue=10, memory=10, waiting=20, warps=2) == pytest.approx((12.5 + 12.5 + 20) / 2)
    phases = _phases([cost(slots=240), cost(slots=350, stored=64)], "sm_90", 16)
    assert all(0.6 < phases[gpu]["90%"] < phases[gpu]["100%"] < 0.95 for gpu in ("H100", "H200"))


def test_inspecting_needs_a_compiler(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["--target", "sm_90"]) == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err
