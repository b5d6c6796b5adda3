"""The verifier against brute force: what it accepts never goes wrong, and what it rejects does."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interpreter import find_fault
from tests.programs import drop_wait, reorder
from tests.random_programs import random_mutation, random_program

from lading.errors import ProgramError
from lading.ir.program import Program
from lading.memory.verify import verify

#: Rejections of form: the verifier asks for more than a correct execution needs.
FORM = re.compile("points backward|multiple of|does not lie within|expected stream|expected from=|already ran")


def rejected(program: Program) -> str:
    """Why ``program`` is rejected; '' if it is accepted."""
    try:
        verify(program)
    except ProgramError as error:
        return str(error)
    return ""


@given(st.integers(0, 1 << 30))
@settings(max_examples=40)
def test_random_valid_programs_are_accepted(seed: int) -> None:
    verify(random_program(Random(seed)))


@given(st.integers(0, 1 << 30))
@settings(max_examples=3)
def test_random_valid_programs_run_right(seed: int) -> None:
    """Checks the generator and the reference themselves."""
    assert not find_fault(random_program(Random(seed)), Random(seed), num_random=20)


def agree(seed: int, num_random: int) -> None:
    """After one random change: rejected, or right in every delay of one event and in random interleavings.

    The other way too: what is rejected, but for its form, does go wrong in some interleaving.
    """
    rng = Random(seed)
    name, program = random_mutation(random_program(rng), rng)
    why = rejected(program)
    if not why:
        fault = find_fault(program, rng, num_random=num_random)
        assert not fault, f"{name}: accepted, yet {fault}"
    elif not FORM.search(why):
        assert find_fault(program, rng, num_random=20), f"{name}: rejected, yet nothing goes wrong: {why}"


@given(st.integers(0, 1 << 30))
@settings(max_examples=30)
def test_accepted_or_wrong(seed: int) -> None:
    agree(seed, 40)


@pytest.mark.slow
@given(st.integers(0, 1 << 30))
@settings(max_examples=2000)
def test_accepted_or_wrong_at_length(seed: int) -> None:
    agree(seed, 200)


def assert_waits_matter(seed: int) -> None:
    """Any one wait left out: rejected if and only if some interleaving goes wrong."""
    rng = Random(seed)
    program = random_program(rng)
    action = rng.choice([a for a in program.actions if a.waits] or [program.actions[0]])
    for wait in action.waits:
        without = drop_wait(program, action.id, wait)
        assert bool(rejected(without)) == bool(find_fault(without, rng, num_random=50))


@given(st.integers(0, 1 << 30))
@settings(max_examples=6)
def test_a_wait_is_missed_exactly_when_it_matters(seed: int) -> None:
    assert_waits_matter(seed)


@pytest.mark.slow
@given(st.integers(0, 1 << 30))
@settings(max_examples=200)
def test_a_wait_is_missed_exactly_when_it_matters_at_length(seed: int) -> None:
    assert_waits_matter(seed)


@given(st.integers(0, 1 << 30))
@settings(max_examples=15)
def test_any_lawful_order_of_the_list_is_accepted(seed: int) -> None:
    """Another topological order of the same streams and waits is the same Program."""
    rng = Random(seed)
    program = random_program(rng)
    queues = {s: [a for a in program.actions if a.stream == s] for s in program.streams}
    order: list[int] = []
    while any(queues.values()):
        ready = [s for s, queue in queues.items() if queue and set(queue[0].waits) <= set(order)]
        order.append(queues[rng.choice(ready)].pop(0).id)
    verify(reorder(program, order))
