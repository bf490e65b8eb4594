"""The sampler against a float64 oracle that sorts: same logits, same noise, same token, whatever stands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.runtime import drive
from zllm_jax.runtime import Sampled, StateShape, init_params, pack_sampling, sample
from zllm_jax.runtime.sampling import truncate
from zllm_jax.runtime.state import History
from zllm_jax.testing import tiny_config
from zllm_jax.values import Sampling

_sample = jax.jit(sample)
_gumbel = jax.jit(
    lambda seed, position, like: jax.random.gumbel(
        jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position), like.shape, jnp.float32
    )
)

# Every parameter alone, and together.
SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature": Sampling(temperature=0.7),
    "top-k": Sampling(temperature=1.3, top_k=5),
    "top-k beyond the vocabulary": Sampling(top_k=1000),
    "top-p": Sampling(top_p=0.8),
    "top-p of almost nothing": Sampling(temperature=2.0, top_p=1e-6),
    "min-p": Sampling(min_p=0.1),
    "repetition": Sampling(temperature=0.9, repetition_penalty=1.4),
    "repetition, greedy": Sampling(temperature=0.0, repetition_penalty=2.5),
    "presence": Sampling(presence_penalty=1.5),
    "frequency": Sampling(frequency_penalty=-0.9),
    "bias": Sampling(temperature=0.0, logit_bias=((3, 100.0), (7, -100.0))),
    "bias, drawn": Sampling(temperature=0.5, logit_bias=((1, 2.5), (30, 1.0))),
    "top-k, then top-p, then min-p": Sampling(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
    "all": Sampling(
        temperature=0.8,
        top_k=20,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((2, 1.5), (5, -3.0)),
        logprobs=5,
    ),
}
VOCABULARIES = (33, 48, 63, 64)


def oracle(
    logits: np.ndarray,
    one: Sampling,
    noise: np.ndarray,
    prompt: np.ndarray,
    counts: np.ndarray,
    allowed: np.ndarray | None = None,
) -> tuple[int, float]:
    """(token, how far it leads the second) for logits f32[V], by the order that `Sampling` documents."""
    x = logits.astype(np.float64)
    for token, bias in one.logit_bias:
        x[token] += bias
    seen = prompt | (counts > 0)
    x = np.where(seen, np.where(x > 0, x / one.repetition_penalty, x * one.repetition_penalty), x)
    x = x - one.frequency_penalty * counts - one.presence_penalty * (counts > 0)
    if allowed is not None:
        x = np.where(allowed, x, -np.inf)
    if one.temperature > 0:
        x = kept(x / one.temperature, one) + noise
    second, first = np.sort(x)[-2:]
    return int(x.argmax()), float(first - second)


def kept(x: np.ndarray, one: Sampling) -> np.ndarray:
    """x f64[V] with -inf outside top-k, top-p and min-p, ties at each border included."""
    if one.top_k:
        x = np.where(x >= np.sort(x)[::-1][min(one.top_k, len(x)) - 1], x, -np.inf)
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    if one.top_p < 1:
        order = np.sort(probs)[::-1]
        border = order[np.searchsorted(np.cumsum(order), one.top_p)]
        x = np.where(probs >= border, x, -np.inf)
    return np.where(probs >= one.min_p * probs.max(), x, -np.inf)


class Case:
    """Random logits, histories and noise for a batch; vocabulary of V tokens."""

    def __init__(self, V: int, samplings: Sequence[Sampling], seed: int) -> None:
        rng = np.random.default_rng(seed)
        B = len(samplings)
        self.V, self.samplings = V, samplings
        self.logits = (3 * rng.standard_normal((B, V))).astype(np.float32)
        self.slots = rng.permutation(B + 2)[:B].astype(np.int32)
        self.prompt = rng.random((B + 2, V)) < 0.2
        self.counts = rng.poisson(0.3, (B + 2, V)).astype(np.int32)
        self.positions = rng.integers(0, 10_000, B).astype(np.int32)
        self.seeds = rng.integers(0, 2**64, B, np.uint64).tolist()
        self.packed = pack_sampling(list(zip(samplings, self.seeds, strict=True)))

    @property
    def history(self) -> History:
        return History(prompt_seen=jnp.asarray(self.prompt), output_counts=jnp.asarray(self.counts))

    def drawn(self, mask: np.ndarray | None = None) -> Sampled:
        return jax.tree.map(
            np.asarray, _sample(self.logits, self.packed, self.history, self.slots, self.positions, mask)
        )

    def expected(self, allowed: np.ndarray | None = None) -> list[tuple[int, float]]:
        found = []
        for b, one in enumerate(self.samplings):
            noise = np.asarray(_gumbel(self.packed.seed[b], self.positions[b], self.logits[b]), np.float64)
            slot = self.slots[b]
            may = None if allowed is None else allowed[b]
            found.append(oracle(self.logits[b], one, noise, self.prompt[slot], self.counts[slot], may))
        return found


def assert_drawn(drawn: Sampled, expected: list[tuple[int, float]]) -> None:
    """Equal, but where rounding decides between two tokens; that is rare."""
    clear = [lead > 1e-5 for _, lead in expected]
    assert np.mean(clear) > 0.95
    found = drawn.ids.tolist()
    assert [a for a, sure in zip(found, clear, strict=True) if sure] == [t for t, lead in expected if lead > 1e-5]


@pytest.mark.parametrize("name", SETTINGS)
def test_one_setting_is_the_oracle(name: str) -> None:
    case = Case(48, [SETTINGS[name]] * 64, seed=len(name))
    assert_drawn(case.drawn(), case.expected())


@pytest.mark.parametrize("V", VOCABULARIES)
def test_each_row_has_its_own_setting(V: int) -> None:
    case = Case(V, [*SETTINGS.values()] * 8, seed=V)
    assert_drawn(case.drawn(), case.expected())


@pytest.mark.parametrize("V", VOCABULARIES)
def test_a_grammar_mask_goes_before_the_truncations(V: int) -> None:
    case = Case(V, [*SETTINGS.values()] * 4, seed=V)
    words = np.random.default_rng(V).integers(0, 2**32, (len(case.samplings), -(-V // 32)), np.uint64)
    mask = words.astype(np.uint32)
    mask[:, 0] |= 1  # at least one token is legal
    allowed = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :V].astype(bool)
    drawn = case.drawn(mask)
    assert allowed[np.arange(len(allowed)), drawn.ids].all()
    assert_drawn(drawn, case.expected(allowed))


def test_an_oracle_with_a_temperature_slightly_off_draws_differently() -> None:
    """The comparison above can fail: among 256 rows, 2 % of temperature changes some token."""
    case = Case(48, [Sampling(temperature=1.0)] * 256, seed=0)
    drawn = case.drawn()
    case.samplings = [Sampling(temperature=1.02)] * 256
    with pytest.raises(AssertionError):
        assert_drawn(drawn, case.expected())


@pytest.mark.parametrize(
    "one, weights, survivors",
    [
        (Sampling(top_k=3), [8, 4, 2, 2, 2, 1, 1], 5),
        (Sampling(top_p=0.55), [4, 4, 4, 2, 1, 1], 3),
        (Sampling(min_p=0.5), [4, 2, 2, 1.99, 1, 1], 3),
        (Sampling(top_k=2, top_p=0.9, min_p=0.6), [8, 5, 5, 4, 1, 1], 3),
    ],
    ids=["top-k", "top-p", "min-p", "all"],
)
def test_ties_at_the_border_are_kept(one: Sampling, weights: list[float], survivors: int) -> None:
    logits = jnp.log(jnp.array([weights], jnp.float32))
    found = np.isfinite(np.asarray(truncate(logits, pack_sampling([(one, 0)]))))[0]
    assert found.tolist() == [i < survivors for i in range(len(weights))]


def test_greedy_takes_the_first_of_equals() -> None:
    case = Case(33, [Sampling(temperature=0.0)] * 2, seed=1)
    case.logits[:] = 0.5
    assert case.drawn().ids.tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 2e-38, 1e-42, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """Where the quotient would overflow as well as where float32 knows the temperature as zero, or nearly."""
    case = Case(48, [Sampling(temperature=temperature)] * 16, seed=3)
    case.logits *= 10
    assert case.drawn().ids.tolist() == case.logits.argmax(1).tolist()


def test_the_draws_follow_the_distribution() -> None:
    """Chi-square of 20,000 draws over 8 tokens; 7 degrees of freedom exceed 24.3 once in a thousand times.

    The seeds are fixed, so the test is; the same draws are far from a distribution 10 % hotter.
    """
    number = 20_000
    logits = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5], np.float32)
    history = History(prompt_seen=jnp.zeros((1, 8), bool), output_counts=jnp.zeros((1, 8), jnp.int32))
    one = pack_sampling([(Sampling(temperature=0.8), 42)])
    many = jax.tree.map(lambda x: np.broadcast_to(x, (number, *x.shape[1:])), one)
    slots = np.zeros(number, np.int32)
    drawn = _sample(np.broadcast_to(logits, (number, 8)), many, history, slots, np.arange(number, dtype=np.int32))
    seen = np.bincount(np.asarray(drawn.ids), minlength=8)

    def chi_square(temperature: float) -> float:
        expected = number * np.exp(drive.log_softmax(logits / temperature))
        return float(((seen - expected) ** 2 / expected).sum())

    assert chi_square(0.8) < 24.3
    assert chi_square(0.88) > 100


def test_a_seed_and_a_position_decide_the_noise_alone() -> None:
    """The same row draws the same among others and in any place; another seed or position draws differently."""
    one = Sampling(temperature=1.5, top_p=0.97)
    case = Case(64, [one] * 24, seed=11)
    among = case.drawn().ids
    order = np.random.default_rng(0).permutation(24)
    packed = pack_sampling([(one, case.seeds[b]) for b in order])
    moved = _sample(case.logits[order], packed, case.history, case.slots[order], case.positions[order])
    assert np.asarray(moved.ids).tolist() == among[order].tolist()
    for b in range(3):
        single = pack_sampling([(one, case.seeds[b])])
        alone = _sample(case.logits[b : b + 1], single, case.history, case.slots[b : b + 1], case.positions[b : b + 1])
        assert int(alone.ids[0]) == among[b]
    later = _sample(case.logits, case.packed, case.history, case.slots, case.positions + np.int32(1))
    assert (np.asarray(later.ids) != among).any()


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, -1])
def test_all_64_bits_of_a_seed_count(seed: int) -> None:
    assert pack_sampling([(Sampling(), seed)]).seed.tolist() == [[seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF]]
    others = [(seed ^ (1 << bit)) & (2**64 - 1) for bit in (0, 31, 32, 63)]
    noise = {
        tuple(np.asarray(_gumbel(pack_sampling([(Sampling(), s)]).seed[0], np.int32(5), np.zeros(8, np.float32))))
        for s in (seed, *others)
    }
    assert len(noise) == 5


def test_logprobs_are_those_of_the_model() -> None:
    """Of the raw logits: neither temperature nor penalties change them; a row that did not ask costs nothing."""
    case = Case(40, [SETTINGS["all"], SETTINGS["temperature"], SETTINGS["greedy"]], seed=2)
    drawn = case.drawn()
    logp = drive.log_softmax(case.logits)
    np.testing.assert_allclose(drawn.logprob, logp[np.arange(3), drawn.ids], rtol=0, atol=1e-5)
    np.testing.assert_allclose(drawn.top_logprobs, -np.sort(-logp)[:, :20], rtol=0, atol=1e-5)
    assert drawn.top_ids.tolist() == np.argsort(-logp, kind="stable")[:, :20].tolist()
    quiet = Case(40, [SETTINGS["temperature"], SETTINGS["greedy"]], seed=2).drawn()
    assert not quiet.top_logprobs.any()


def test_more_than_the_usual_biases_count() -> None:
    bias = tuple((token, -50.0) for token in range(1, 48))
    case = Case(48, [Sampling(temperature=0.0, logit_bias=bias)], seed=1)
    assert case.drawn().ids.tolist() == [0]


SHAPE = StateShape(num_pages=4, page_tokens=8, num_rings=1, num_slots=4, max_pages=4)


@pytest.fixture(scope="module")
def runner() -> drive.Scorer:
    cfg = tiny_config("llama")
    params = init_params(cfg, jax.random.key(3))
    return drive.scorer(params, cfg, SHAPE, prefill_buckets=(8,), decode_buckets=(2,))


def test_penalties_see_the_prompt_and_the_output_of_their_own_sequence(runner: drive.Scorer) -> None:
    """Without a penalty the model repeats itself; with one, no token of prompt or output comes again."""
    prompt, place = [5, 6, 7], drive.Place((2, 0, 3, 1), slot=2)
    strong = Sampling(temperature=0.0, repetition_penalty=100.0, presence_penalty=2.0)

    def tokens(sampling: Sampling) -> list[int]:
        runner.begin(place.slot, prompt)
        first = drive.prefilled(runner, prompt, place, size=8, sampling=sampling)
        return drive.ids(drive.continued(runner, first, len(prompt), place, 12, sampling=sampling))

    plain = tokens(drive.GREEDY)
    assert len(set(plain)) < len(plain)
    penalised = tokens(strong)
    assert len({*penalised, *prompt}) == len(penalised) + len(prompt)
    assert tokens(strong) == penalised, "begin must forget the last sequence of the slot"


def test_only_ids_cross_unless_logprobs_are_asked_for(runner: drive.Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed: list[Any] = []
    fetch = np.asarray

    def count(value: Any, *args: Any, **options: Any) -> np.ndarray:
        if isinstance(value, jax.Array):
            crossed.append(value.size)
        return fetch(value, *args, **options)

    place = drive.Place((0, 1, 2, 3))
    drive.prefilled(runner, [1, 2, 3], place, size=8)
    with monkeypatch.context() as patch:
        patch.setattr(np, "asarray", count)
        runner.decode([drive.row(1, 3, place, budget=4)], 4)
    assert sum(crossed) == 2 + 4 * 2  # how many tokens each of 2 rows drew, and the ids of 4 steps
    crossed.clear()
    with monkeypatch.context() as patch:
        patch.setattr(np, "asarray", count)
        runner.decode([drive.row(1, 3, place, budget=4, sampling=drive.GREEDY_LOGPROBS)], 4)
    assert sum(crossed) > 4 * 2 * 20
