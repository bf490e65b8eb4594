"""Ids against independent implementations, bytes against texts, and what rebuilt tokenizers must refuse."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from zllm_jax.checkpoint import TokenizerFiles, Vocabulary, open_tokenizer
from zllm_jax.dialect import Detokenizer, Tokenizer, load_tokenizer
from zllm_jax.dialect.spm import split_tokens
from zllm_jax.errors import BadTokenizer

REFERENCE = Path(__file__).parent.parent / "data" / "reference"


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Tokenizer:
    return load_tokenizer(open_tokenizer(smollm2))


@pytest.fixture(scope="module")
def gemma(gemma3: Path) -> Tokenizer:
    return load_tokenizer(open_tokenizer(gemma3))


@pytest.fixture(scope="module")
def v4(deepseek: Path) -> Tokenizer:
    return load_tokenizer(open_tokenizer(deepseek))


@pytest.fixture(params=["smol", "gemma", "v4", "llama2", "json"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def prompts(name: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((REFERENCE / name / "reference.json").read_text())["prompts"]
    return [prompt for prompt in found if prompt["text"] is not None]


@pytest.mark.parametrize("name, fixture", [("smollm2", "smol"), ("deepseek", "v4")])
def test_vectors(name: str, fixture: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(fixture)
    for vector in json.loads((REFERENCE / name / "tokenizer_vectors.json").read_text())["vectors"]:
        assert tokenizer.encode(vector["text"]) == vector["ids"]
        assert tokenizer.decode(vector["ids"], skip_special=False) == vector["text"]


@pytest.mark.parametrize("prompt", prompts("smollm2"), ids=lambda prompt: prompt["name"])
def test_smollm2_prompts(prompt: dict[str, object], smol: Tokenizer) -> None:
    assert smol.encode(str(prompt["text"])) == prompt["prompt_ids"]


@pytest.mark.parametrize("prompt", prompts("gemma3"), ids=lambda prompt: prompt["name"])
def test_gemma_prompts(prompt: dict[str, object], gemma: Tokenizer) -> None:
    assert gemma.encode(str(prompt["text"])) == prompt["prompt_ids"]
    assert gemma.decode(prompt["greedy_ids"]) == prompt["greedy_text"]  # type: ignore[arg-type]


def test_what_the_files_say(smol: Tokenizer, gemma: Tokenizer) -> None:
    assert (smol.vocab_size, smol.bos_id, smol.eos_ids, smol.add_bos) == (49_152, 1, (2,), False)
    assert (gemma.vocab_size, gemma.bos_id, gemma.eos_ids, gemma.add_bos) == (262_144, 2, (1,), True)
    assert smol.token_bytes(2) == b"<|im_end|>"
    assert 2 in smol.special_ids


def test_what_the_files_of_deepseek_say(v4: Tokenizer) -> None:
    assert (v4.vocab_size, v4.bos_id, v4.eos_ids, v4.add_bos) == (129_280, 0, (1,), False)
    assert v4.encode("<think></think>｜DSML｜") == [128_821, 128_822, 128_825]
    assert not {128_821, 128_822, 128_825} & v4.special_ids  # markup that calls are read from is text


# Small tokenizers of the two other kinds -----------------------------------------------------------------------------

BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def llama2_files() -> TokenizerFiles:
    """A SentencePiece vocabulary in Llama 2's manner: a space is put before each text; rare characters are bytes."""
    pieces = ("▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello", "é")
    tokens = ("<unk>", "<s>", "</s>", *BYTES, *pieces)
    types = (2, 3, 3, *[6] * 256, *[1] * len(pieces))
    scores = (*[0.0] * 259, *(-float(rank) for rank in range(len(pieces))))
    vocabulary = Vocabulary(kind="llama", pre="default", tokens=tokens, types=types, scores=scores, unknown_id=0)
    return TokenizerFiles(vocabulary=vocabulary, bos_id=1, eos_ids=(2,))


@pytest.fixture(scope="module")
def llama2() -> Tokenizer:
    return load_tokenizer(llama2_files())


def json_library(*, template: bool = True) -> Library:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: id for id, piece in enumerate([*alphabet, "Ġh", "el", "lo"])}
    library = Library(models.BPE(vocab=vocabulary, merges=[("Ġ", "h"), ("e", "l"), ("l", "o")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<bos>", "<eos>"])
    library.add_tokens(["<call>"])
    if template:
        bos = library.token_to_id("<bos>")
        library.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    return library


@pytest.fixture(scope="module")
def json_files(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    path = tmp_path_factory.mktemp("json") / "tokenizer.json"
    json_library().save(str(path))
    settings = {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"}
    return TokenizerFiles(tokenizer_json=path, settings=settings, eos_ids=(7,))


@pytest.fixture(scope="module", name="json")
def json_tokenizer(json_files: TokenizerFiles) -> Tokenizer:
    return load_tokenizer(json_files)


def test_llama2_space_is_an_artefact(llama2: Tokenizer) -> None:
    ids = llama2.encode("hello", add_bos=False)
    assert [llama2.token_bytes(id) for id in ids] == [b" hello"]
    assert llama2.decode(ids) == "hello"
    assert llama2.encode("hello") == [1, *ids]
    assert llama2.decode([1, *ids]) == "hello"
    following = Detokenizer(llama2, continuing=True)
    assert following.feed(ids) + following.close() == " hello"


def test_llama2_bytes(llama2: Tokenizer) -> None:
    ids = llama2.encode("水", add_bos=False)[1:]
    assert [llama2.token_bytes(id) for id in ids] == [b"\xe6", b"\xb0", b"\xb4"]


def test_settings_of_a_json_tokenizer(json: Tokenizer) -> None:
    bos, eos, call = (json.encode(text, add_bos=False)[0] for text in ("<bos>", "<eos>", "<call>"))
    assert (json.bos_id, json.eos_ids, json.add_bos) == (bos, (7, eos), True)
    assert json.special_ids == {bos, eos}
    assert json.decode([bos, call, eos]) == "<call>"


def test_json_without_a_template_adds_nothing(tmp_path: Path) -> None:
    json_library(template=False).save(str(tmp_path / "tokenizer.json"))
    plain = load_tokenizer(TokenizerFiles(tokenizer_json=tmp_path / "tokenizer.json", bos_id=3))
    assert (plain.add_bos, plain.bos_id) == (False, 3)


def test_a_sentencepiece_file_is_its_vocabulary(llama2: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(llama2._proto)  # type: ignore[attr-defined]
    settings = {"added_tokens_decoder": {"300": {"content": "<|im_start|>", "special": True}}}
    found = load_tokenizer(TokenizerFiles(sentencepiece=tmp_path / "tokenizer.model", settings=settings))
    text = "hello é 水 hello"
    assert found.encode(text) == llama2.encode(text)
    assert (found.bos_id, found.eos_ids, found.add_bos, found.strips_space) == (1, (2,), True, True)
    assert found.encode("<|im_start|>", add_bos=False) == [300]
    assert (found.vocab_size, found.token_bytes(300), 300 in found.special_ids) == (301, b"<|im_start|>", True)


# What holds for all of them ------------------------------------------------------------------------------------------


def test_bos(tokenizer: Tokenizer) -> None:
    bos = tokenizer.bos_id
    assert bos is not None
    spelled = tokenizer.token_bytes(bos).decode()
    plain = tokenizer.encode("hello", add_bos=False)
    assert tokenizer.encode("hello", add_bos=True) == [bos, *plain]
    assert tokenizer.encode(spelled + "hello")[:2] != [bos, bos]
    assert tokenizer.encode("", add_bos=False) == []


def test_special_tokens_as_plain_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.bos_id is not None
    text = f"a{tokenizer.token_bytes(tokenizer.bos_id).decode()}b"
    assert tokenizer.bos_id in tokenizer.encode(text, add_bos=False)
    plain = tokenizer.encode(text, add_bos=False, parse_special=False)
    assert tokenizer.special_ids.isdisjoint(plain)
    assert tokenizer.decode(plain) == text


def test_ids_without_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""


TEXTS = ["", " ", "  two", "line\n\nnext\t", "naïve café 水 👋🏽", "\u0000", "١٢٣ ½", "a\r\nb", "<0x41>", "x" * 300]


def missing_bytes(tokenizer: Tokenizer) -> set[int]:
    """SmolLM2's vocabulary lacks some bytes (0xF1, which begins U+40000): its tokenizer drops them."""
    known = {tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)}
    return {byte for byte in range(256) if bytes([byte]) not in known}


@settings(max_examples=80, deadline=None)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=40)))
def test_round_trip(text: str, request: pytest.FixtureRequest) -> None:
    for name in ("smol", "gemma", "json"):
        tokenizer: Tokenizer = request.getfixturevalue(name)
        if name == "smol" and missing_bytes(tokenizer) & set(text.encode()):
            continue
        ids = tokenizer.encode(text, add_bos=False, parse_special=False)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_incremental_is_the_whole(data: st.DataObject, request: pytest.FixtureRequest) -> None:
    """Any ids in any pieces, control tokens and broken characters included."""
    tokenizer: Tokenizer = request.getfixturevalue(data.draw(st.sampled_from(["smol", "gemma", "llama2", "json"])))
    some = st.integers(0, min(tokenizer.vocab_size + 2, 600))
    ids = data.draw(st.one_of(st.lists(some, max_size=30), st.text().map(tokenizer.encode)))
    skip = data.draw(st.booleans())
    detokenizer, pieces, rest = Detokenizer(tokenizer, skip_special=skip), [], ids
    while rest:
        step = data.draw(st.integers(0, 3))
        pieces.append(detokenizer.feed(rest[:step]))
        rest = rest[step:]
    assert "".join([*pieces, detokenizer.close()]) == tokenizer.decode(ids, skip_special=skip)
    whole = b"".join(tokenizer.token_bytes(id) for id in ids if not (skip and id in tokenizer.special_ids))
    if not tokenizer.strips_space:
        assert tokenizer.decode(ids, skip_special=skip) == whole.decode(errors="replace")


def test_no_replacement_character_mid_stream(tokenizer: Tokenizer) -> None:
    text = "水👋🏽é한"
    ids = tokenizer.encode(text, add_bos=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed([id]) for id in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert detokenizer.close() == ""


def test_half_a_character_at_the_end(llama2: Tokenizer) -> None:
    ids = llama2.encode("水", add_bos=False)[:-1]
    detokenizer = Detokenizer(llama2)
    assert (detokenizer.feed(ids), detokenizer.close()) == ("", "\ufffd")


def test_digest_tells_tokenizers_apart(llama2: Tokenizer, json: Tokenizer) -> None:
    files = llama2_files()
    assert load_tokenizer(files).digest == llama2.digest
    assert load_tokenizer(replace(files, bos_id=2)).digest != llama2.digest
    assert json.digest != llama2.digest


@given(st.lists(st.sampled_from(["<a>", "<ab>", "<a", ">", "b", "<", " "]), max_size=12))
def test_split_tokens_takes_the_longest(parts: list[str]) -> None:
    text = "".join(parts)
    found = list(split_tokens(text, {"<a>": 0, "<ab>": 1, "<a": 2}))
    spelled = ["<a>", "<ab>", "<a"]
    assert "".join(spelled[part] if isinstance(part, int) else part for part in found) == text
    assert all("<a" not in part for part in found if isinstance(part, str))
    for part, following in pairwise(found):
        if part == 2 and isinstance(following, str):
            assert not following.startswith((">", "b>"))


# Rebuilt from a GGUF: the pre-tokenizer decides -----------------------------------------------------------------------


def byte_level(pre: str, merges: tuple[str, ...] = ()) -> TokenizerFiles:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = (*alphabet, *(merge.replace(" ", "") for merge in merges), "<|end|>", "<call>")
    types = (*[1] * (len(tokens) - 2), 3, 4)
    return TokenizerFiles(
        vocabulary=Vocabulary(kind="gpt2", pre=pre, tokens=tokens, types=types, merges=merges), bos_id=len(tokens) - 2
    )


@pytest.mark.parametrize(
    "pre, digits",
    [("gpt-2", [4]), ("default", [4]), ("smollm", [1, 1, 1, 1]), ("qwen2", [1, 1, 1, 1]), ("llama-bpe", [3, 1])],
)
def test_digits_are_cut_as_the_name_says(pre: str, digits: list[int]) -> None:
    tokenizer = load_tokenizer(byte_level(pre, ("2 0", "20 0", "200 7")))
    ids = tokenizer.encode("2007", add_bos=False)
    assert [len(tokenizer.token_bytes(id)) for id in ids] == digits
    assert tokenizer.add_bos == (pre == "llama-bpe")


def test_llama3_takes_whole_words_without_merges() -> None:
    """`ignore_merges`: a piece that is in the vocabulary is one token, whatever the merges say."""
    files = byte_level("llama-bpe", ("a b",))
    assert files.vocabulary is not None
    tokens = (*files.vocabulary.tokens, "xyz")
    vocabulary = replace(files.vocabulary, tokens=tokens, types=(*files.vocabulary.types, 1))
    assert load_tokenizer(replace(files, vocabulary=vocabulary)).encode("xyz", add_bos=False) == [len(tokens) - 1]


def test_user_defined_tokens_are_text() -> None:
    tokenizer = load_tokenizer(byte_level("qwen2"))
    (call,) = tokenizer.encode("<call>", add_bos=False)
    assert call not in tokenizer.special_ids
    assert tokenizer.decode([call, *tokenizer.encode("<|end|>")]) == "<call>"


@pytest.mark.parametrize(
    "files, complaint",
    [
        (TokenizerFiles(), "neither tokenizer.json nor"),
        (byte_level("deepseek-llm"), "'deepseek-llm', an unknown pre-tokenizer; known are gpt-2"),
        (byte_level("gpt-2", ("a missing",)), "merges do not fit"),
        (TokenizerFiles(vocabulary=Vocabulary(kind="t5", pre="", tokens=("a",), types=(1,))), "'t5'; known are gpt2"),
        (TokenizerFiles(vocabulary=Vocabulary(kind="llama", pre="", tokens=("a",), types=(1,))), "0 scores for 1"),
        (
            TokenizerFiles(vocabulary=Vocabulary(kind="llama", pre="", tokens=("a",), types=(1,), scores=(0.0,))),
            "SentencePiece refuses",
        ),
    ],
)
def test_unusable(files: TokenizerFiles, complaint: str) -> None:
    with pytest.raises(BadTokenizer, match=complaint):
        load_tokenizer(files)


PIECES = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(["<unk>", "<0x41>", "a", ""]), st.text(max_size=3)),
        st.integers(0, 8),
        st.floats(width=32),
    ),
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(pieces=PIECES, kind=st.sampled_from(["llama", "gpt2"]), unknown=st.none() | st.integers(0, 7))
def test_junk_in_a_vocabulary_never_crashes(
    pieces: list[tuple[str, int, float]], kind: str, unknown: int | None
) -> None:
    tokens, types, scores = zip(*pieces, strict=True) if pieces else ((), (), ())
    vocabulary = Vocabulary(
        kind=kind, pre="default", tokens=tokens, types=types, scores=scores, unknown_id=unknown, add_bos=False
    )
    with contextlib.suppress(BadTokenizer):
        tokenizer = load_tokenizer(TokenizerFiles(vocabulary=vocabulary))
        tokenizer.decode(tokenizer.encode("a<unk>b"))


@pytest.mark.parametrize(
    "entries",
    [{"x": {"content": "a"}}, {"5": {}}, {"5": 5}, {"99999999999": {"content": "a"}}, {"-1": {"content": "a"}}],
)
def test_broken_added_tokens(entries: dict[str, object], llama2: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(llama2._proto)  # type: ignore[attr-defined]
    files = TokenizerFiles(sentencepiece=tmp_path / "tokenizer.model", settings={"added_tokens_decoder": entries})
    with pytest.raises(BadTokenizer, match="added_tokens_decoder"):
        load_tokenizer(files)


@pytest.mark.parametrize("content", ["", "{}", '{"model": 5}'])
def test_broken_json(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadTokenizer, match=r"tokenizer\.json cannot be loaded"):
        load_tokenizer(TokenizerFiles(tokenizer_json=tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("vocabulary, end", [({}, "0"), ({"a": 5_000_000}, "5,000,001")])
def test_json_with_an_impossible_vocabulary(vocabulary: dict[str, int], end: str, tmp_path: Path) -> None:
    library = Library(models.BPE(vocab=vocabulary, merges=[]))
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadTokenizer, match=f"ids end at {end};"):
        load_tokenizer(TokenizerFiles(tokenizer_json=tmp_path / "tokenizer.json"))


def test_json_of_another_kind(tmp_path: Path) -> None:
    library = Library(models.WordPiece({"[UNK]": 0}))
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadTokenizer, match=r"its decoder is \['WordPiece'\]"):
        load_tokenizer(TokenizerFiles(tokenizer_json=tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("content", [b"", b"junk"])
def test_broken_sentencepiece(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(BadTokenizer, match="SentencePiece refuses"):
        load_tokenizer(TokenizerFiles(sentencepiece=tmp_path / "tokenizer.model"))
