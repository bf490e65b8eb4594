"""What the cache promises, which test proves each promise, and a fault that this test finds.

    python -m tests.proofs.table

writes `docs/proofs.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.proofs.run import Mutant, Proof

PAGE = Path("docs/proofs.md")
FAULTS_TEST = "tests/e2e/test_known_faults.py"

PROOFS = (
    Proof(
        1,
        "A hit is an equal prefix of token ids, shorter than the prompt.",
        "tests/cache/test_prefix_cache.py::test_the_last_token_of_a_prompt_is_always_computed",
        Mutant("zllm_jax/cache/look_up.py", "usable = prompt[:-1]", "usable = prompt"),
        "a prompt that is stored whole is a hit to its very end, and nothing is left to predict from",
    ),
    Proof(
        2,
        "The longest prefix wins, also one on disk over a shorter one in device memory.",
        "tests/cache/test_prefix_cache.py::test_a_longer_prefix_on_disk_wins_over_a_shorter_one_on_the_device",
        Mutant(
            "zllm_jax/cache/look_up.py",
            "if far is not None and far.common > here:",
            "if far is not None and near is None:",
        ),
        "the disk is asked only when device memory has nothing",
    ),
    Proof(
        3,
        "What is restored is what was saved, bit for bit.",
        "tests/cache/test_prefix_cache.py::test_evicted_is_restored_bit_for_bit",
        Mutant("zllm_jax/cache/restore.py", "pages[first : first + per_group],", "pages[:per_group],"),
        "every group of rows is copied to the first pages",
    ),
    Proof(
        4,
        "A state is found only by the same weights, layout, type and salt, whatever the pages and devices.",
        "tests/e2e/test_wiring.py::test_the_identity_of_a_state",
        Mutant("zllm_jax/wiring.py", '"salt": config.salt,', '"salt": "",'),
        "the salt is left out of the identity",
    ),
    Proof(
        5,
        "A snapshot exists once its manifest is written, and that comes last: a crash leaves all or nothing.",
        "tests/cache/test_snapshot_crash.py::test_the_manifest_is_last",
        Mutant("zllm_jax/cache/snapshot_writer.py", "while self._pending:", "while False:"),
        "the manifest does not wait for the chunk files",
    ),
    Proof(
        6,
        "A file on disk is not trusted: all of it is checked before it is used.",
        "tests/cache/test_snapshot_hostile.py::test_corruptions",
        Mutant(
            "zllm_jax/cache/snapshot_reader.py",
            "if chunk_name(self._prefix, file.stage, file.start, blocks) != file.name:",
            "if len(file.name) != 32:",
        ),
        "the checksum of a chunk file is not looked at",
    ),
    Proof(
        7,
        "What is listed after a restart can be restored.",
        "tests/cache/test_snapshot_hostile.py::test_a_restart_quarantines_what_has_another_size",
        Mutant("zllm_jax/cache/snapshot_shelf.py", "self.check_chunk(name, nbytes)", "continue"),
        "a snapshot is listed without a look at its files",
    ),
    Proof(
        8,
        "A failure of the cache is a miss, and the request succeeds.",
        "tests/scheduler/test_scheduler.py::test_a_broken_snapshot_is_a_miss_and_the_request_succeeds",
        Mutant("zllm_jax/scheduler/scheduler.py", "self._restart(one, lease, error)", "self._fault(one, error)"),
        "a snapshot that cannot be read ends the request that wanted it",
    ),
    Proof(
        9,
        "The bytes that are reported are those of the arrays and of the files.",
        "tests/cache/test_prefix_cache.py::test_the_ledger_counts_real_bytes",
        Mutant(
            "zllm_jax/cache/prefix_cache.py",
            "(pages.size - pages.free) * c.page_bytes + (rings.size - rings.free) * c.ring_bytes",
            "(pages.size - pages.free) * c.page_bytes",
        ),
        "rings are not counted",
    ),
    Proof(
        10,
        "Memory for the whole output is reserved at admission: no request dies of memory on its way.",
        "tests/scheduler/test_scheduler.py::test_requests_wait_for_memory_and_none_starves",
        Mutant(
            "zllm_jax/cache/prefix_cache.py",
            "wanted = -(-(len(prompt) + max_tokens) //",
            "wanted = -(-(len(prompt) + 1) //",
        ),
        "only the prompt and one token are reserved",
    ),
    Proof(
        11,
        "Restoring or recomputing: measured rates decide.",
        "tests/cache/test_prefix_cache.py::test_recomputing_wins_when_reading_is_measured_to_be_slower",
        Mutant("zllm_jax/cache/rates.py", "or self.restore_s < self.compute_s", "or self.restore_s >= 0.0"),
        "what is on disk is always read",
    ),
    Proof(
        12,
        "A stage computes once its own rows are there, and not before.",
        "tests/scheduler/test_plan.py::test_a_stage_runs_when_its_own_rows_are_there",
        Mutant("zllm_jax/scheduler/plan.py", "ready = one.stages_ready(num_stages)", "ready = num_stages"),
        "stages compute whose rows are still on their way",
    ),
    Proof(
        13,
        "Pages come home however a request ends.",
        "tests/scheduler/test_scheduler.py::test_cancel_takes_effect_within_one_call",
        Mutant("zllm_jax/scheduler/scheduler.py", "self._cache.abort(one.lease)", "one.lease = None"),
        "a cancelled request keeps its pages",
    ),
    Proof(
        14,
        "A fork shares the pages of what it continues and costs its own tail.",
        "tests/cache/test_prefix_cache.py::test_a_fork_costs_only_its_own_tail",
        Mutant("zllm_jax/cache/pool.py", "self._owners[id] += 1", "self._owners[id] += 0"),
        "who shares a page is not counted as its owner",
    ),
    Proof(
        15,
        "A near miss says which tokens differ, with the text around and the place in the request.",
        "tests/e2e/test_known_faults.py::test_fault_03_what_is_common_is_reused_and_the_difference_reported",
        Mutant(
            "zllm_jax/cache/near_miss.py",
            "there=_ids(stored[common : common + CONTEXT_TOKENS])",
            "there=_ids(prompt[common : common + CONTEXT_TOKENS])",
        ),
        "the stored side shows the prompt's tokens",
    ),
    Proof(
        16,
        "An answer that a client sends back is replayed by its sampled ids.",
        "tests/dialect/test_replay.py::test_ids_are_replayed_not_their_text",
        Mutant(
            "zllm_jax/dialect/replay.py",
            "[*turn.ids[: turn.num_prompt + num_ids].tolist(), *ids]",
            "[*turn.ids[: turn.num_prompt].tolist(), *(self._encode(echoed) or ()), *ids]",
        ),
        "the echoed text is encoded again",
    ),
    Proof(
        17,
        "Removing a snapshot never touches a file that another one names.",
        "tests/cache/test_snapshot_sharing.py::test_deleting_spares_what_another_snapshot_names",
        Mutant(
            "zllm_jax/cache/snapshot_ledger.py",
            "if name not in self._chunks and name not in self._pins]",
            "if name not in self._pins]",
        ),
        "every file of a removed snapshot goes, shared or not",
    ),
    Proof(
        18,
        "Tenants do not see each other's states.",
        "tests/cache/test_prefix_cache.py::test_tenants_never_hit_each_other",
        Mutant("zllm_jax/cache/prefix_cache.py", "owner = tenant_key(tenant)", 'owner = ""'),
        "the cache does not ask whose request it is",
    ),
)


@dataclass(frozen=True)
class Fault:
    """A fault that users of another server met."""

    number: int
    words: str

    @property
    def prefix(self) -> str:
        """What the name of its test begins with."""
        return f"test_fault_{self.number:02}_"


FAULTS = (
    Fault(1, "A nonce in the first system block changes each request: no hits."),
    Fault(2, "An empty thought, rendered in the newest turn only, forks the history."),
    Fault(3, "A long common prefix is computed again, and nobody is told where it parted."),
    Fault(4, "White space around an answer is lost on its way back: no hit."),
    Fault(5, "Regenerating an answer computes the whole prompt again."),
    Fault(6, "Thoughts and calls in turn are flattened into another order."),
    Fault(7, "Arguments serialised with other separators fork the history."),
    Fault(8, "A template puts a newline before a call, the model did not."),
    Fault(9, "A state that cannot be cut anywhere vetoes every hit."),
    Fault(10, "The disk gives back another request's state."),
    Fault(11, "What is on disk is forgotten at a restart."),
    Fault(12, "One failed load keeps its request waiting for ever."),
    Fault(13, "A flipped bit in a file of the right size goes unnoticed."),
    Fault(14, "Another layout on the device reads the same names, and nonsense."),
    Fault(15, "Much is stored, nothing is ever loaded."),
    Fault(16, "Pages are attached without the fixed arrays that belong to them."),
    Fault(17, "A restore succeeds, and everything is computed nevertheless."),
    Fault(18, "Reading from disk takes longer than computing would."),
    Fault(19, "A sliding window is left out of what is stored."),
    Fault(42, "Requests that never reach the cache are not counted: the hit rate looks healthy."),
)


def fault_test(repo: Path, fault: Fault) -> str:
    """The name of a fault's test. Raises `ValueError` unless there is exactly one."""
    found = [name for name in names_of_tests(repo / FAULTS_TEST) if name.startswith(fault.prefix)]
    if len(found) != 1:
        raise ValueError(f"{FAULTS_TEST} has {len(found)} tests {fault.prefix}*, must be one")
    return found[0]


def names_of_tests(path: Path) -> Iterator[str]:
    """The names of the test functions of a file, in order."""
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("def test_"):
            yield line.removeprefix("def ").partition("(")[0]


def render(repo: Path) -> str:
    """The page."""
    lines = [HEAD]
    for one in PROOFS:
        path, _, name = one.test.partition("::")
        test = f"[`{name}`](../{path})"
        lines.append(f"| {one.number} | {one.promise} | {test} | {one.fault} | `{one.mutant.file}` |\n")
    lines.append(MIDDLE)
    lines += [f"| {one.number} | {one.words} | `{fault_test(repo, one)}` |\n" for one in FAULTS]
    return "".join(lines)


HEAD = """\
# Proofs

What the [cache](architecture/06-cache.md) promises, and the test that proves each promise. A test that cannot fail
proves nothing: for each there is a fault, a change of one line, that this very test finds.
`pytest tests/proofs -m slow` plants every fault in a copy of the sources and sees the test fail. The tests without the
mark see that the tests named here exist, that each fault can still be planted, and that this page is what
`python -m tests.proofs.table` writes.

| no. | promise | test | a fault that it finds | planted in |
|---|---|---|---|---|
"""

MIDDLE = f"""
## Known faults

What users of other servers met, each a test of [`{FAULTS_TEST}`](../{FAULTS_TEST}).

| no. | fault | test |
|---|---|---|
"""


if __name__ == "__main__":
    PAGE.write_text(render(Path()), "utf-8")
