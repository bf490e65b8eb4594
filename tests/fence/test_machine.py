"""The machine's definition: guards, frames, outcomes, and the builder's refusals."""

from __future__ import annotations

import pytest

from zllm_jax.fence import MAX_DEPTH, Condition, Edge, Frame, Machine, MachineBuilder, decimal_number, machine_of


def nested() -> Machine:
    """Balanced brackets, each pair holding at most one other: the smallest use of the stack."""
    builder = MachineBuilder()
    start, inside, end = builder.state(), builder.state(), builder.state(accepting=True)
    closed = builder.state()
    builder.edge(start, b"[", Edge(inside, push=builder.returns((0, end))))
    builder.edge(inside, b"[", Edge(inside, push=builder.returns((0, closed))))
    for state in (inside, closed):
        builder.edge(state, b"]", Edge(pop=1))
    return builder.build(start)


def members() -> Machine:
    """`(`, then the letters a, b, c in any order and each at most once, of which a must come, then `)`."""
    builder = MachineBuilder()
    start, inside, end = builder.state(), builder.state(), builder.state(accepting=True)
    builder.edge(start, b"(", Edge(inside, push=builder.returns((0, end))))
    for i, letter in enumerate(b"abc"):
        builder.edge(inside, [letter], Edge(inside, (Condition(some_clear=1 << i),), use=1 << i, add=1))
    builder.edge(inside, b")", Edge(guard=(Condition(need=1),), pop=1))
    return builder.build(start)


@pytest.mark.parametrize("text", [b"(a)", b"(cab)", b"(ba)"])
def test_members_come_in_any_order(text: bytes) -> None:
    assert members().accepts(text)


@pytest.mark.parametrize("text", [b"(aa)", b"()", b"(bc)", b"(ad)", b"(a", b"a)", b"(a))"])
def test_what_a_register_forbids(text: bytes) -> None:
    assert not members().accepts(text)


def test_members_in_any_order_cost_states_in_their_number() -> None:
    assert members().num_states == 4


def test_frames_nest_as_deep_as_the_stack() -> None:
    machine = nested()
    assert machine.accepts(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert machine.run(b"[" * (MAX_DEPTH + 1)).dead


def test_a_text_ends_only_with_all_frames_closed() -> None:
    machine = nested()
    at = machine.run(b"[[]")
    assert not at.dead
    assert not machine.ended(at)
    assert machine.ended(machine.run(b"]", at))


def test_a_position_is_a_value() -> None:
    machine = members()
    before = machine.run(b"(a")
    assert machine.run(b"b", before) != before
    assert before.stack == (Frame(), Frame(0, 1, 1))


def test_the_first_condition_that_holds_decides() -> None:
    builder = MachineBuilder()
    few, many = builder.state(accepting=True), builder.state(accepting=True)
    start = builder.state()
    builder.edge(start, b"x", Edge(start, add=1))
    choice = Edge(many, (Condition(low=2),), otherwise=Edge(few, (Condition(low=1),)))
    builder.edge(start, b".", choice)
    machine = builder.build(start)
    assert [machine.run(b"x" * n + b".").state for n in range(4)] == [0, few, many, many]


@pytest.mark.parametrize(
    "condition, used, holds",
    [
        (Condition(high=2, owed=0b11), 0b00, True),  # none yet, two owed
        (Condition(high=1, owed=0b11), 0b00, False),
        (Condition(high=1, owed=0b11), 0b10, True),
        (Condition(room=MAX_DEPTH), 0, True),
        (Condition(room=MAX_DEPTH + 1), 0, False),
    ],
)
def test_limits_count_what_is_owed(condition: Condition, used: int, holds: bool) -> None:
    assert condition.holds(Frame(0, used, 0), 0) is holds


def test_a_finite_automaton_is_a_machine() -> None:
    number = machine_of(decimal_number())
    for text in (b"-0.50", b"120", b"012", b"1.", b"-", b""):
        assert number.accepts(text) is decimal_number().accepts(text)


def test_a_builder_refuses_two_ways_for_one_byte() -> None:
    builder = MachineBuilder()
    one, other = builder.state(), builder.state()
    builder.edge(one, b"a", other)
    builder.edge(one, b"a", other)
    with pytest.raises(ValueError, match="0x61 already leads elsewhere"):
        builder.edge(one, b"a", one)
