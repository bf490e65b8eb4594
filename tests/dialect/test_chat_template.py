"""Templates: what Hugging Face gives them, what the sandbox keeps from them, and whose fault an error is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zllm_jax.checkpoint import open_checkpoint
from zllm_jax.dialect import ChatTemplate, load_tokenizer, require_template
from zllm_jax.errors import BadTokenizer, InvalidRequest

REFERENCE = Path(__file__).parent.parent / "data" / "reference"
HELLO = [{"role": "user", "content": "hello"}]


def test_smollm2_prompt_is_the_reference(smollm2: Path) -> None:
    prompts = json.loads((REFERENCE / "smollm2" / "reference.json").read_text())["prompts"]
    (wanted,) = (prompt for prompt in prompts if prompt["name"] == "chat_gravity")
    checkpoint = open_checkpoint(smollm2)
    assert checkpoint.tokenizer is not None
    question = wanted["text"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    text = require_template(checkpoint.chat_template).render([{"role": "user", "content": question}])
    assert text == wanted["text"]
    assert load_tokenizer(checkpoint.tokenizer).encode(text) == wanted["prompt_ids"]


def test_a_base_model_says_what_to_do(gemma3: Path) -> None:
    with pytest.raises(InvalidRequest, match="give the text as prompt=") as error:
        require_template(open_checkpoint(gemma3).chat_template)
    assert error.value.param == "messages"


def test_blocks_leave_no_blanks() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.role }}\n    {% endfor %}\nend"
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(HELLO) == "<s>\nuser\nend"


def test_what_templates_expect() -> None:
    source = (
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{%- generation %}{{ strftime_now('%Y') | length }}{% endgeneration %}"
        "{{ tools | tojson(indent=1) if tools else 'none' }}{{ extra }}{{ add_generation_prompt }}"
    )
    template = ChatTemplate(source)
    found = template.render([{"role": "user", "content": "<é>"}, *HELLO], extra=3)
    assert found == '{"role": "user", "content": "<é>"}4none3True'
    assert template.render([], tools=[{"b": 1}], add_generation_prompt=False) == '4[\n {\n  "b": 1\n }\n]False'


@pytest.mark.parametrize(
    "source, complaint",
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "fails on the messages: TypeError"),
        ("{{ nothing.at.all }}", "refuses the messages"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_errors_are_the_requests(source: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as error:
        ChatTemplate(source).render(HELLO)
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ strftime_now.__globals__.os }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render(HELLO)
    assert HELLO == [{"role": "user", "content": "hello"}]


def test_a_broken_template_is_the_checkpoints() -> None:
    template = ChatTemplate("{% for m in messages %}\n{{ m.")
    with pytest.raises(BadTokenizer, match="broken at line 2"):
        template.render(HELLO)
