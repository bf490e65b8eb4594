"""The leaves refuse a wrong value where it is made, and name it; nothing is released before it is complete."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from zllm_jax import EngineConfig, Envelope, ModelConfig, Request, Sampling, Status, ZllmError, errors, release
from zllm_jax.errors import BudgetExceeded, ConfigError, InvalidRequest, NotReleased
from zllm_jax.values import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, Timing, Usage


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("seed", 1 << 64),
        ("logprobs", -1),
        ("logprobs", MAX_TOP_LOGPROBS + 1),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", tuple((i, 1.0) for i in range(MAX_LOGIT_BIAS + 1))),
    ],
)
def test_a_sampling_value_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field) as error:
        Sampling(**{field: value})
    assert error.value.param == field


def test_sampling_is_hashable_whatever_its_bias_came_as() -> None:
    assert hash(Sampling(logit_bias={7: 1.0, 3: -1.0})) == hash(Sampling(logit_bias=((3, -1.0), (7, 1.0))))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given, name",
    [("Hi", "prompt"), ([1, 2], "tokens"), ([{"role": "user", "content": "Hi"}], "messages")],
)
def test_the_first_argument_is_what_its_type_says(given: Any, name: str) -> None:
    request = Request(given)
    assert getattr(request, name) == (given if name == "prompt" else tuple(given))
    assert request == Request(**{name: given})


@pytest.mark.parametrize(
    "arguments, param",
    [
        ({}, "messages"),
        ({"prompt": "a", "tokens": (1,)}, "messages"),
        ({"input": "a", "prompt": "b"}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"tokens": ()}, "tokens"),
        ({"messages": ()}, "messages"),
        ({"tokens": (-1,)}, "tokens"),
        ({"tokens": (1.5,)}, "tokens"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "stop": ("",)}, "stop"),
        ({"prompt": "a", "timeout_s": 0.0}, "timeout_s"),
        ({"prompt": "a", "timeout_s": math.nan}, "timeout_s"),
    ],
)
def test_a_wrong_request_names_its_parameter(arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        Request(**arguments)
    assert error.value.param == param


@pytest.mark.parametrize(
    "change",
    [
        {"max_batch": 0},
        {"page_tokens": -1},
        {"device_cache_bytes": 0},
        {"max_seq_tokens": -5},
        {"dtype": "float16"},
        {"state_dtype": "int8"},
        {"decode_steps": 0},
        {"tensor_parallel": 0},
        {"max_queue": 0},
        {"prefill_buckets": ()},
        {"prefill_buckets": (128, 32)},
        {"decode_buckets": (1, 1)},
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**change)


def test_the_decode_buckets_reach_the_largest_batch() -> None:
    assert EngineConfig(max_batch=12).decode_buckets == (1, 8, 12)


MODEL = {
    "arch": "llama",
    "num_layers": 2,
    "embed_dim": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "ffn_dim": 16,
    "vocab_size": 33,
    "max_context_tokens": 64,
}


def test_configurations_are_static_arguments() -> None:
    assert hash(ModelConfig(**MODEL)) == hash(ModelConfig(**MODEL))  # type: ignore[arg-type]
    assert hash(EngineConfig()) == hash(EngineConfig())


@pytest.mark.parametrize("change", [{"num_layers": 0}, {"num_kv_heads": 3}, {"vocab_size": -1}])
def test_an_impossible_model_is_named(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(ConfigError, match=name):
        ModelConfig(**(MODEL | change))


def test_the_budget_error_names_its_three_numbers() -> None:
    error = BudgetExceeded(prompt_tokens=90, max_tokens=20, budget_tokens=100)
    assert all(number in str(error) for number in ("90", "20", "100", "110"))
    assert error.param == "max_tokens"
    assert BudgetExceeded(prompt_tokens=100, max_tokens=1, budget_tokens=100).param == "prompt"


@pytest.mark.parametrize("status", Status)
def test_only_a_completed_answer_is_released(status: Status) -> None:
    envelope = Envelope(request_id="r", status=status, text="42")
    if status is Status.COMPLETED:
        assert release(envelope) == "42"
    else:
        with pytest.raises(NotReleased, match=status.value):
            release(envelope)


def test_sums_are_of_their_parts() -> None:
    parts = [field.name for field in dataclasses.fields(Timing)]
    timing = Timing(**{name: 2.0**i for i, name in enumerate(parts)})
    assert timing.ttft_s == 1 + 2 + 4 + 8
    assert timing.total_s == 2 ** len(parts) - 1
    assert Usage(prompt_tokens=10, cached_tokens=7).prefilled_tokens == 3


def test_every_error_of_the_tree_has_its_own_code() -> None:
    def below(error: type[ZllmError]) -> list[type[ZllmError]]:
        return [error, *(deeper for sub in error.__subclasses__() for deeper in below(sub))]

    tree = [error for error in below(ZllmError) if error.__module__ == errors.__name__]
    assert len({error.code for error in tree}) == len(tree)
    assert all(error.__name__ in (errors.__doc__ or "") for error in tree)
