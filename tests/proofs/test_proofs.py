"""The promises of the cache have tests, the tests find faults, and the page about them is up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.proofs.run import Proof, run_with_mutant
from tests.proofs.table import FAULTS, FAULTS_TEST, PAGE, PROOFS, names_of_tests, render

PROMISES = 18


def test_every_promise_has_a_proof() -> None:
    assert [one.number for one in PROOFS] == list(range(1, PROMISES + 1))


def test_the_page_is_what_the_table_says(repo: Path) -> None:
    assert (repo / PAGE).read_text("utf-8") == render(repo)


def test_every_known_fault_has_a_row(repo: Path) -> None:
    named = [re.match(r"test_fault_(\d+)_", name) for name in names_of_tests(repo / FAULTS_TEST)]
    assert sorted(int(one[1]) for one in named if one is not None) == [one.number for one in FAULTS]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda one: str(one.number))
def test_the_test_is_there_and_the_fault_can_be_planted(repo: Path, proof: Proof) -> None:
    path, _, name = proof.test.partition("::")
    assert name in names_of_tests(repo / path)
    mutant = proof.mutant
    assert (repo / mutant.file).read_text("utf-8").count(mutant.old) == 1
    assert mutant.new != mutant.old


@pytest.mark.slow
@pytest.mark.parametrize("proof", PROOFS, ids=lambda one: str(one.number))
def test_the_fault_is_found(repo: Path, tmp_path: Path, proof: Proof) -> None:
    done = run_with_mutant(repo, tmp_path, proof)
    summary = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"\b[1-9]\d* failed", summary), summary  # a fixture that breaks has found nothing
