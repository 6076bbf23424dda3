"""Levels and barriers: hazards by byte ranges, checked against brute force on random programs."""

from __future__ import annotations

import random

from lily.schedule import Binding, Dispatch, Region, assign_levels, barriers, conflicts


def dispatch(id: str, *accesses: tuple[str, int, int, str]) -> Dispatch:
    bindings = tuple(Binding(i, Region(b, start, end - start), mode) for i, (b, start, end, mode) in enumerate(accesses))
    return Dispatch(id, "f", "k", bindings, 30, "S", (), (1, 1, 1), (32, 1, 1))


def levels(*dispatches: Dispatch) -> dict[str, int]:
    return {d.id: d.level for d in assign_levels(dispatches)}


def test_read_after_write_orders_two_dispatches() -> None:
    assert levels(dispatch("a", ("m", 0, 8, "w")), dispatch("b", ("m", 4, 6, "r"))) == {"a": 0, "b": 1}


def test_write_after_read_orders_two_dispatches() -> None:
    assert levels(dispatch("a", ("m", 0, 8, "r")), dispatch("b", ("m", 7, 9, "w"))) == {"a": 0, "b": 1}


def test_write_after_write_orders_two_dispatches() -> None:
    assert levels(dispatch("a", ("m", 0, 8, "w")), dispatch("b", ("m", 0, 8, "w"))) == {"a": 0, "b": 1}


def test_reads_and_touching_ranges_share_a_level() -> None:
    got = levels(dispatch("a", ("m", 0, 8, "r")), dispatch("b", ("m", 0, 8, "r")), dispatch("c", ("m", 8, 16, "w")), dispatch("d", ("n", 0, 8, "w")))
    assert set(got.values()) == {0}


def test_a_read_between_two_writes_is_after_the_first_and_before_the_second() -> None:
    got = levels(dispatch("w1", ("m", 0, 8, "w")), dispatch("r", ("m", 0, 4, "r")), dispatch("w2", ("m", 0, 8, "rw")))
    assert (got["w1"], got["r"], got["w2"]) == (0, 1, 2)


def test_empty_ranges_never_conflict() -> None:
    assert set(levels(dispatch("a", ("m", 4, 4, "w")), dispatch("b", ("m", 0, 8, "w"))).values()) == {0}


def test_barriers_stand_exactly_where_the_level_changes() -> None:
    plan = assign_levels([dispatch("a", ("m", 0, 8, "w")), dispatch("b", ("m", 0, 8, "r")), dispatch("c", ("n", 0, 8, "w"))])
    assert [d.id for d in plan] == ["a", "c", "b"]
    assert barriers(plan) == [False, False, True]


def test_random_programs_keep_every_conflicting_pair_in_order_and_no_level_is_higher_than_needed() -> None:
    rng = random.Random(5)
    for _ in range(200):
        program = []
        for i in range(rng.randint(1, 25)):
            accesses = []
            for _ in range(rng.randint(1, 3)):
                start = rng.randint(0, 20)
                accesses.append((rng.choice("mn"), start, start + rng.randint(0, 8), rng.choice(["r", "w", "rw"])))
            program.append(dispatch(str(i), *accesses))
        level = levels(*program)
        for j, later in enumerate(program):
            before = [level[e.id] for e in program[:j] if conflicts(e, later)]
            assert level[later.id] == (max(before) + 1 if before else 0)


def test_writers_of_one_group_share_a_level_and_readers_wait_for_all_of_them() -> None:
    def grouped(id: str, group: str | None, extra: tuple[str, int, int, str] | None = None) -> Dispatch:
        bindings = [Binding(0, Region("m", 0, 8), "w", None, group)]
        if extra:
            bindings.append(Binding(1, Region(extra[0], extra[1], extra[2] - extra[1]), extra[3]))
        return Dispatch(id, "f", "k", tuple(bindings), 30, "S", (), (1, 1, 1), (32, 1, 1))

    got = levels(dispatch("before", ("m", 0, 8, "r")), dispatch("slow", ("n", 0, 8, "w")), grouped("a", "g"), grouped("b", "g", ("n", 0, 8, "r")),
                 dispatch("reader", ("m", 2, 4, "r")), grouped("c", "other"))
    assert got == {"before": 0, "slow": 0, "a": 1, "b": 1, "reader": 2, "c": 3}
    assert levels(dispatch("slow", ("n", 0, 8, "w")), dispatch("slower", ("n", 0, 8, "rw")), grouped("a", "g"), grouped("b", "g", ("n", 0, 8, "r")),
                  dispatch("reader", ("m", 2, 4, "r")))["reader"] == 3
