"""Instruction counts: listings short enough to count by hand, and the roofs derived from them."""

import dataclasses

import pytest

from tools import machine_code
from tools.gpus import GPUS, TARGETS
from tools.inspect_kernels import Report, _clocks_a_turn, _pass, _phases, _print_tables, _programs, _roof, main


def listing(*lines):
    """Format instructions as the disassembler prints them: 16 bytes each, addresses from 0."""
    code = "\n".join(f"        /*{16 * i:04x}*/   {line} ;     /* 0x000000ff */" for i, line in enumerate(lines))
    return machine_code.parse("  .headerflags @1\n" + code + "\n        /* 0x0123 */\n")


ONE_AT_A_TIME = listing(
    "MOV R2, RZ",
    "LDG.E.EF.128 R8, desc[UR6][R4.64]",  # the loop begins
    "FADD R1, R8, R1",
    "LDG.E.EF.128 R12, desc[UR6][R4.64+0x10]",
    "FMNMX R1, R15, R1, !PT",
    "ISETP.GE.AND P0, PT, R2, 0x7, PT",
    "@!P0 BRA 0x10",
    "STG.E [R4.64], R1",
    "EXIT",
)


def test_loads_that_wait_for_each_other():
    (cost,) = machine_code.passes(ONE_AT_A_TIME)
    assert (cost.slots, cost.alu_slots) == (6, 2)
    assert (cost.load_width, cost.loaded, cost.stored) == (16, 32, 0)
    assert (cost.in_flight, cost.waits) == (1, 2)


def test_loads_that_leave_together():
    loads = [f"LDG.E.128 R{4 * i}, desc[UR6][R40.64]" for i in range(1, 5)]
    (cost,) = machine_code.passes(listing(*loads, "LDG.E.64 R60, [R42.64]", "FADD R1, R18, R1", "@P0 BRA 0x0", "EXIT"))
    assert (cost.in_flight, cost.waits, cost.loaded) == (4, 1, 64)  # the narrow load does not belong to it


def test_a_load_for_the_next_iteration():
    (cost,) = machine_code.passes(listing("FADD R1, R8, R1", "LDG.E.128 R8, [R4.64]", "FADD R2, R3, R3", "@P0 BRA 0x0"))
    assert (cost.in_flight, cost.waits) == (1, 1)


def test_narrow_accesses():
    (cost,) = machine_code.passes(
        listing("LDG.E.U16 R8, [R4.64]", "LDG.E.U16 R9, [R4.64+0x2]", "PRMT R8, R8, R9, R1", "@P0 BRA 0x0")
    )
    assert (cost.load_width, cost.loaded, cost.in_flight) == (2, 4, 2)


def test_only_innermost_loops_over_memory_are_passes():
    code = listing(
        "MOV R1, R1",
        "LDG.E R2, [R4.64]",
        "@P0 BRA 0x10",
        "MOV R3, R3",
        "@P1 BRA 0x0",
        "VIADD R1, R1, 0x1",
        "@P2 BRA 0x50",
        "EXIT",
    )
    assert [range(1, 3), range(5, 7)] == machine_code.loops(code)
    (cost,) = machine_code.passes(code)
    assert cost.slots == 2


WITH_A_RARE_PART = (
    "LDG.E.128 R4, [R2.64]",
    "@!P1 BRA 0x50",  # unless the tile holds the id
    "LDG.E R8, [R10.64]",
    "MUFU.EX2 R8, R8",
    "FADD R4, R8, R4",
    "STG.E.128 [R2.64], R4",
    "@P0 BRA 0x0",
    "EXIT",
)


def test_skipped_parts_are_not_charged_to_each_iteration():
    (cost,) = machine_code.passes(listing(*WITH_A_RARE_PART))
    assert (cost.slots, cost.rare_slots, cost.xu_slots) == (4, 3, 0)
    assert (cost.loaded, cost.stored) == (16, 16)


def test_a_skippable_part_that_moves_elements_is_charged():
    wide = ["LDG.E.128 R8, [R10.64]" if line.startswith("LDG.E R8") else line for line in WITH_A_RARE_PART]
    (cost,) = machine_code.passes(listing(*wide))
    assert (cost.slots, cost.rare_slots, cost.xu_slots, cost.loaded) == (7, 0, 1, 32)


def test_an_inner_loop_that_reads_less_is_a_skippable_part():
    code = listing(
        "MOV R1, RZ",
        "LDG.E.U16 R4, [R2.64]",  # the outer loop begins
        "LDG.E.U16 R5, [R2.64+0x2]",
        "FMNMX R1, R4, R5, !PT",
        "@!P1 BRA 0x80",
        "LDG.E.U16 R6, [R2.64]",  # the inner loop begins
        "MUFU.LG2 R6, R6",
        "@P2 BRA 0x50",
        "@P0 BRA 0x10",
        "EXIT",
    )
    (cost,) = machine_code.passes(code)
    assert (cost.slots, cost.rare_slots, cost.xu_slots, cost.loaded) == (5, 3, 0, 4)
    assert machine_code.tail(code) == 2


def test_the_tail_is_outside_of_the_loops_over_memory():
    code = listing(
        "MOV R1, RZ",
        "MOV R2, RZ",
        "LDG.E.128 R4, [R2.64]",
        "FADD R1, R4, R1",
        "@P0 BRA 0x20",
        "STG.E [R2.64], R1",
        "EXIT",
    )
    assert machine_code.tail(code) == 4
    assert machine_code.tail(listing("LDG.E R1, [R2.64]", "STG.E [R2.64], R1", "EXIT")) == 3  # a merge is only a tail


def test_a_loop_that_only_writes_is_a_loop_over_memory():
    code = listing("MOV R1, RZ", "MOV R2, RZ", "STG.E.128 [R2.64], R4", "IADD3 R2, R2, R3, RZ", "@P0 BRA 0x20", "EXIT")
    assert machine_code.tail(code) == 3
    assert machine_code.passes(code) == []


def test_the_longest_path_omits_skipped_parts():
    code = listing(
        "ISETP.NE.AND P0, PT, R1, RZ, PT",
        "@P0 BRA 0x50",
        "MOV R2, RZ",
        "LDG.E.128 R4, [R2.64]",
        "EXIT",
        "EXIT",
        "BRA 0x60",
    )
    cost = machine_code.whole(code)
    assert (cost.slots, cost.alu_slots, cost.loaded) == (5, 2, 16)


def test_a_search_takes_its_steps():
    cost = machine_code.whole(listing("MOV R1, RZ", "LOP3.LUT R1, R1, R2, RZ", "@P0 BRA 0x10", "EXIT"))
    assert cost.slots == 2 + 2 * machine_code.SEARCH_STEPS


@pytest.mark.parametrize(
    ("name", "slots", "in_flight"), [("A100", 22.0, 11.5), ("H100", 19.7, 16.0), ("H200", 14.4, 22.9)]
)
def test_budgets_at_the_speed_of_a_copy(name, slots, in_flight):
    gpu = GPUS[name]
    assert gpu.slots(2) == pytest.approx(slots, abs=0.05)
    assert gpu.bytes_in_flight() / 1024 == pytest.approx(in_flight, abs=0.05)


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
        (cost(waits=4), 32, "latency"),
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


def test_an_iteration_of_one_warp_waits_only_for_itself():
    assert _clocks_a_turn(issue=100, memory=300, waiting=1000, warps=1) == 1400


def test_iterations_of_many_warps_run_at_the_speed_of_the_bottleneck():
    assert _clocks_a_turn(issue=100, memory=300, waiting=1000, warps=100) == pytest.approx(300, rel=1e-3)


def test_two_warps_by_hand():
    # A single warp takes 40 clocks, 10 of them at each of the two queues. A second warp finds each queue busy for a
    # quarter of the time.
    assert _clocks_a_turn(issue=10, memory=10, waiting=20, warps=2) == pytest.approx((12.5 + 12.5 + 20) / 2)


def test_phases_that_do_not_overlap():
    first, second = cost(slots=240), cost(slots=350, stored=64)
    found = _phases([first, second], "sm_90", 16)
    assert found.keys() == {"H100", "H200"}
    assert all(0.6 < shares["90%"] < shares["100%"] < 0.95 for shares in found.values())
    assert found["H200"]["100%"] < found["H100"]["100%"]  # the memory is slower, the multiprocessors are similar
    more = _phases([first, second], "sm_90", 64)
    assert all(more[gpu]["100%"] > found[gpu]["100%"] for gpu in found)
    assert _phases([first], "sm_90", 16) == _phases([second, second], "sm_90", 16) == _phases([], "sm_90", 16) == {}


def test_a_pass_between_reading_and_writing_is_a_phase():
    """It reads from the L2 cache.

    It costs less than the first pass, and more if part of its bytes is not in the cache.
    """
    first, last = cost(slots=240), cost(slots=350, stored=64)
    two, three, four = (_phases([first] * n + [last], "sm_90", 16) for n in (1, 2, 3))
    for gpu in ("H100", "H200"):
        times = [1 / found[gpu]["100%"] for found in (two, three, four)]
        assert times[0] < times[1] < times[2]
        assert times[2] - times[1] == pytest.approx(times[1] - times[0])
        assert three[gpu]["90%"] < three[gpu]["100%"]
    assert _phases([first, last, last], "sm_90", 16) == _phases([first, first], "sm_90", 16) == {}


@pytest.mark.parametrize(
    ("registers", "shared", "num_warps", "programs"),
    [(60, 32, 8, 4), (89, 32, 8, 2), (32, 0, 8, 8), (83, 64, 16, 1), (16, 0, 1, 32), (16, 100 * 1024, 4, 2)],
)
def test_programs_that_fit(registers, shared, num_warps, programs):
    assert _programs(TARGETS["sm_90"], registers, shared, num_warps) == programs


def test_the_tables(capsys):
    pass_ = _pass(cost(slots=352, alu=232, xu=16, rare=40, loads=2, waits=2), 16, "sm_90", num_warps=8, programs=2)
    resources = {"registers": 89, "spills": 0, "shared": 32, "widest_access": 16, "num_warps": 8}
    found = Report(
        "kernel[bf16]", "kernel", "bf16", {}, "sm_90", **resources, programs=2, occupancy=0.25, passes=[pass_], tail=77
    )
    in_phases = dataclasses.replace(found, phases={"H100": {"100%": 0.9, "90%": 0.8}})
    merge = dataclasses.replace(found, kernel="merge", passes=[], tail=129)
    _print_tables([merge, in_phases, found])
    budgets, kernels = capsys.readouterr().out.split("of one element")
    assert "| A100 | 22.0  | 11.0 | 2.8  | 11.5 KiB" in budgets
    merged, phased, cells = ([cell.strip() for cell in line.split("|")] for line in kernels.splitlines()[-3:])
    assert merged[10:12] == ["129", ""]
    assert phased[18] == "H100 phases 90% / 80%"
    assert cells[1:10] == ["kernel[bf16]", "sm_90", "89", "0", "32", "16", "8", "2", "25%"]
    assert cells[10:18] == ["77", "22.00", "14.50", "1.00", "2.50", "2", "2 x 16", "16 KiB"]
    assert cells[18] == "H100 latency 42%, H200 latency 30%"


def test_inspecting_needs_a_compiler(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["--target", "sm_90"]) == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err


def test_the_loop_that_draws_is_the_one_with_the_most_products():
    few = ["IMAD R1, R2, R3, R4", "MOV R5, R6", "MOV R5, R7", "@P0 BRA 0x0"]
    many = ["IMAD.WIDE.U32 R1, R2, R3, R4", "IMAD R5, R6, R7, R8", "@P0 BRA 0x40"]
    assert machine_code.slots_of_products(listing(*few, *many, "EXIT")) == 3
    assert machine_code.slots_of_products(listing("IMAD R1, R2, R3, R4", "MOV R1, R2", "EXIT")) == 3
    assert (
        machine_code.slots_of_products(listing("MOV R1, R2", "@P0 BRA 0x0", "EXIT"))
        == 2 * machine_code.SEARCH_STEPS + 1
    )
