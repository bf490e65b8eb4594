"""numpy oracle <-> reference <-> interpreted TPU kernel, over logits whose illegal ones are NaN."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.tolerances import SAMPLER_MUTANTS, TOLERANCES, largest_error
from pallas_kernels.masked_sampler import masked_sample, tpu
from pallas_kernels.masked_sampler.cases import CASES, Case
from pallas_kernels.masked_sampler.config import Config, heuristic
from pallas_kernels.masked_sampler.noise import gumbel, threefry_2x32

SMALL = [case for case in CASES if case.small]
by_case = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
both = pytest.mark.parametrize("implementation", ["reference", "tpu"])
NO_ROW = (-1, -np.inf, False)
SCORE_MARGIN = 1e-4  # two noisy logits closer than this may change places between float32 and float64

Sample = tuple[np.ndarray, np.ndarray, np.ndarray]


def run(inputs: dict[str, Any], implementation: str) -> Sample:
    if implementation == "reference":
        return jax.device_get(masked_sample(**inputs, implementation="reference"))
    with interpreted():
        return jax.device_get(masked_sample(**inputs, implementation=implementation))


@functools.cache
def run_case(case: Case, implementation: str) -> Sample:
    return run(case.inputs(), implementation)


def numpy_gumbel(seed: np.ndarray, vocab_size: int) -> np.ndarray:
    """Threefry-2x32-13 and -log(-log(1 - u)), written apart from noise.py: five key injections, 64-bit integers."""
    word = 2**32 - 1
    keys = [int(seed[0]), int(seed[1]), int(seed[0]) ^ int(seed[1]) ^ 0x1BD11BDA]
    x = np.arange(vocab_size, dtype=np.uint64) + np.uint64(keys[0]) & np.uint64(word)
    y = np.full(vocab_size, keys[1], np.uint64)
    for group in range(4):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2][: 4 if group < 3 else 1]:
            x = x + y & np.uint64(word)
            y = (y << np.uint64(turn) | y >> np.uint64(32 - turn)) & np.uint64(word) ^ x
        if group < 3:
            x = x + np.uint64(keys[(group + 1) % 3]) & np.uint64(word)
            y = y + np.uint64(keys[(group + 2) % 3] + group + 1) & np.uint64(word)
    u = (x.astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log1p(-u))


def oracle(inputs: dict[str, Any]) -> list[tuple[int, float, bool, np.ndarray]]:
    """(id, logprob, ok, noisy logits) of each row in float64; illegal tokens are never looked at."""
    rows = []
    for logits, words, temperature, seed in zip(*(inputs[name] for name in _ARRAYS), strict=True):
        V = len(logits)
        legal = [token for token in range(V) if words[token // 32] >> np.uint32(token % 32) & 1]
        scores = np.full(V, -np.inf)
        if not legal:
            rows.append((*NO_ROW, scores))
            continue
        tempered = logits[legal].astype(np.float64) / (temperature if temperature > 0 else 1.0)
        scores[legal] = tempered + (numpy_gumbel(seed, V)[legal] if temperature > 0 else 0.0)
        token = int(np.argmax(scores))
        top = tempered.max()
        log_total = top + np.log(np.exp(tempered - top).sum())
        rows.append((token, tempered[legal.index(token)] - log_total, True, scores))
    return rows


_ARRAYS = ("logits", "mask", "temperature", "seeds")


@by_case
@both
def test_equals_the_oracle(case: Case, implementation: str) -> None:
    inputs = case.inputs()
    ids, logprob, ok = run_case(case, implementation)
    expected = oracle(inputs)
    for row, (token, _, has_tokens, scores) in enumerate(expected):
        assert ok[row] == has_tokens
        if inputs["temperature"][row] > 0 and has_tokens:
            assert scores[ids[row]] >= scores[token] - SCORE_MARGIN
        else:
            assert ids[row] == token
    bound = TOLERANCES["masked_sampler", case.dtype].bound
    assert largest_error(logprob, [row[1] for row in expected]) <= bound


@by_case
def test_kernel_and_reference_draw_the_same_tokens(case: Case) -> None:
    np.testing.assert_array_equal(run_case(case, "tpu")[0], run_case(case, "reference")[0])


@pytest.mark.parametrize("mutant", SAMPLER_MUTANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tolerance_rejects_its_mutants(dtype: str, mutant: str) -> None:
    case = Case(name="mutant", batch=5, vocab_size=4096, dtype=dtype)
    tolerance = TOLERANCES["masked_sampler", dtype]
    mutated = tolerance.mutants[mutant](case.inputs())
    _, logprob, _ = run(dict(mutated), "reference")
    assert largest_error(logprob, [row[1] for row in oracle(case.inputs())]) > tolerance.bound


@pytest.mark.parametrize(
    "rounds, key, counter, expected",
    [  # the known answers of Random123
        (13, (0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        (13, (0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0xFD36D048, 0x2D17272C)),
        (13, (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xBA3E4725, 0xF27D669E)),
        (20, (0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        (20, (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_its_known_answers(
    rounds: int, key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]
) -> None:
    def words(pair: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
        return jnp.uint32(pair[0]), jnp.uint32(pair[1])

    assert tuple(int(word) for word in threefry_2x32(words(key), words(counter), rounds)) == expected


def test_noise_is_standard_gumbel_and_finite() -> None:
    tokens = jnp.arange(200_000, dtype=jnp.int32)
    key = (jnp.full(tokens.shape, 7, jnp.uint32), jnp.full(tokens.shape, 9, jnp.uint32))
    noise = np.sort(np.asarray(gumbel(key, tokens), np.float64))
    assert np.isfinite(noise).all()
    expected = (np.arange(len(noise)) + 0.5) / len(noise)
    distance = np.abs(np.exp(-np.exp(-noise)) - expected).max() * np.sqrt(len(noise))
    assert distance < 1.95  # Kolmogorov-Smirnov, one in a thousand


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = counts.sum() * probabilities
    return float(np.sum((counts - expected) ** 2 / expected))


def test_draws_follow_the_masked_tempered_distribution() -> None:
    """Keys that differ in one small number, as positions of one sequence do."""
    draws, temperature = 40_000, 0.7
    logits = np.array([0.0, 1.0, np.nan, -1.0, 2.0, 0.5, 9.0], np.float32)
    legal = np.array([1, 1, 0, 1, 1, 1, 0], bool)
    ids, _, ok = run(
        {
            "logits": np.tile(logits, (draws, 1)),
            "mask": np.full((draws, 1), 0b0111011, np.uint32),
            "temperature": np.full(draws, temperature, np.float32),
            "seeds": np.stack([np.full(draws, 5, np.uint32), np.arange(draws, dtype=np.uint32)], axis=1),
        },
        "reference",
    )
    assert ok.all()
    counts = np.bincount(ids, minlength=7)
    assert (counts[~legal] == 0).all()

    def softmax(temperature: float) -> np.ndarray:
        weights = np.exp(logits[legal] / temperature)
        return weights / weights.sum()

    limit = 18.47  # of chi-square with 4 degrees of freedom, one in a thousand
    assert chi_square(counts[legal], softmax(temperature)) < limit
    assert chi_square(counts[legal], softmax(1.05 * temperature)) > limit
    # Neighbouring positions draw independently: 24 degrees of freedom.
    rank = np.cumsum(legal)[ids] - 1
    pairs = np.bincount(rank[:-1:2] * 5 + rank[1::2], minlength=25)
    assert chi_square(pairs, np.outer(softmax(temperature), softmax(temperature)).ravel()) < 51.18


@both
def test_greedy_takes_the_lowest_of_equal_tokens(implementation: str) -> None:
    logits = np.zeros((3, 9000), np.float32)
    logits[0, [8800, 300, 172, 5000]] = 1  # one lane (172 + 128 = 300), other chunks, another tile
    logits[1, [140, 131]] = 1  # two lanes of one chunk
    logits[2] = -4.0
    ids, logprob, ok = run(_unmasked(logits, temperature=0.0), implementation)
    assert ids.tolist() == [172, 131, 0]
    assert ok.all()
    np.testing.assert_allclose(logprob[2], -np.log(9000), rtol=1e-6)


@both
def test_rows_without_a_distribution_say_so(implementation: str) -> None:
    logits = np.zeros((6, 40), np.float32)
    logits[1] = -np.inf
    logits[2, 39] = np.nan
    logits[3, 39] = np.inf
    logits[4, :39] = -np.inf  # one token left: fine
    inputs = _unmasked(logits, temperature=1.0) | {"mask": np.full((6, 2), 2**32 - 1, np.uint32)}
    inputs["mask"][0] = [0, 0xFFFFFF00]  # only bits past the vocabulary
    ids, logprob, ok = run(inputs, implementation)
    assert ok.tolist() == [False, False, False, False, True, True]
    assert (ids[:4] == -1).all()
    assert (logprob[:4] == -np.inf).all()
    assert (ids[4], logprob[4]) == (39, 0.0)


@both
def test_a_row_draws_the_same_alone_and_anywhere_in_a_batch(implementation: str) -> None:
    inputs = Case(name="batch", batch=9, vocab_size=500, temperatures=(1.0, 0.5)).inputs()
    ids, logprob, _ = run(inputs, implementation)
    backwards = {name: value[::-1].copy() for name, value in inputs.items()}
    np.testing.assert_array_equal(run(backwards, implementation)[0], ids[::-1])
    alone = {name: value[3:4] for name, value in inputs.items()}
    assert run(alone, implementation)[0] == ids[3]
    np.testing.assert_array_equal(run(alone, implementation)[1], logprob[3:4])


def test_any_tile_size_draws_the_same() -> None:
    case = next(case for case in SMALL if case.name == "ragged_v32017")
    with interpreted():
        ids, _, _ = tpu.masked_sample(**case.inputs(), config=Config(rows_per_tile=16, words_per_tile=128))
        np.testing.assert_array_equal(ids, run_case(case, "tpu")[0])


def test_no_mask_means_all_legal() -> None:
    inputs = Case(name="full", batch=2, vocab_size=70, legal=1.0).inputs()
    inputs["logits"] = np.nan_to_num(inputs["logits"])
    every = run(inputs | {"mask": np.full((2, 3), 2**32 - 1, np.uint32)}, "reference")
    for one, other in zip(run(inputs | {"mask": None}, "reference"), every, strict=True):
        np.testing.assert_array_equal(one, other)


def test_auto_takes_the_reference_on_a_cpu_and_for_dtypes_the_kernel_refuses() -> None:
    inputs = SMALL[0].inputs()
    np.testing.assert_array_equal(masked_sample(**inputs)[0], run_case(SMALL[0], "reference")[0])
    inputs["logits"] = inputs["logits"].astype(np.float16)
    with pytest.raises(ValueError, match="logits are float16, the kernel takes float32 or bfloat16"):
        masked_sample(**inputs, implementation="tpu")
    assert masked_sample(**inputs)[2].all()


def test_a_named_kernel_raises_where_it_cannot_run() -> None:
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        masked_sample(**SMALL[0].inputs(), implementation="tpu")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logits": np.zeros(50, np.float32)}, r"logits must have the dimensions \[B, V\]"),
        ({"logits": np.zeros((1, 50), np.int32)}, "logits must be floating, got int32"),
        ({"mask": np.zeros((1, 3), np.uint32)}, "mask .* but W is 2"),
        ({"mask": np.zeros((1, 2), np.int32)}, "mask must be uint32, got int32"),
        ({"temperature": np.zeros(2, np.float32)}, "temperature .* but B is 1"),
        ({"seeds": np.zeros((1, 1), np.uint32)}, "seeds .* but 2 is 2"),
        ({"implementation": "gpu"}, "implementation is 'gpu', must be one of auto, reference, tpu"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        masked_sample(**(SMALL[0].inputs() | change))


def test_the_heuristic_keeps_tiles_within_vocabulary_and_limit() -> None:
    assert heuristic(vocab_size=50, itemsize=4) == Config(rows_per_tile=8, words_per_tile=128)
    assert heuristic(vocab_size=4097, itemsize=2) == Config(rows_per_tile=16, words_per_tile=256)
    assert heuristic(vocab_size=262_144, itemsize=2).tokens_per_tile == 16_384


def _unmasked(logits: np.ndarray, *, temperature: float) -> dict[str, Any]:
    B = len(logits)
    return {
        "logits": logits,
        "mask": None,
        "temperature": np.full(B, temperature, np.float32),
        "seeds": np.zeros((B, 2), np.uint32),
    }
