"""The command line: what it prints, its exit codes, and how it ends when it is misused or cut off."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

import zllm_jax
from zllm_jax.buffers import RowSpec
from zllm_jax.cache.manifest import parse
from zllm_jax.cache.snapshot import Base, SnapshotStore
from zllm_jax.cache.snapshot_bench import save_whole
from zllm_jax.cli import engine as engine_options
from zllm_jax.cli import experiment, generate, main
from zllm_jax.cli.output import ConsoleProgress, print_table, size
from zllm_jax.errors import DownloadFailed
from zllm_jax.values import CallDelta, Delta, Envelope, NamedTool, Request, Status, Timing, ToolCall, Usage


class Ticket:
    """Says `pieces`, then the envelope; may raise on the way."""

    def __init__(
        self, request: Request, pieces: Sequence[str | Delta], status: Status, error: BaseException | None
    ) -> None:
        self.request, self.pieces, self.status, self.error = request, pieces, status, error
        self.canceled = False

    def __iter__(self) -> Iterator[Delta]:
        for piece in self.pieces:
            yield Delta(text=piece, tokens=(1,)) if isinstance(piece, str) else piece
        if self.error:
            raise self.error
        yield Delta(
            envelope=Envelope(
                request_id="r",
                status=self.status,
                tokens=(1,) * len(self.pieces),
                text="".join(piece if isinstance(piece, str) else piece.text for piece in self.pieces),
                calls=(ToolCall("c", "weather", {"city": "Oslo"}),) if self.request.tools else (),
                usage=Usage(prompt_tokens=5, cached_tokens=2, generated_tokens=len(self.pieces)),
                timing=Timing(prefill_s=0.25, decode_s=0.5),
                error="why it failed" if self.status is Status.FAULTED else None,
            )
        )

    def cancel(self) -> None:
        self.canceled = True


class Speaker:
    """An engine that says one thing."""

    def __init__(
        self, pieces: Sequence[str | Delta], status: Status = Status.COMPLETED, error: BaseException | None = None
    ) -> None:
        self.pieces, self.status, self.error = pieces, status, error
        self.tickets: list[Ticket] = []
        self.closed = False

    def submit(self, request: Request) -> Ticket:
        self.tickets.append(Ticket(request, self.pieces, self.status, self.error))
        return self.tickets[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.closed = True


@pytest.fixture
def speaker(monkeypatch: pytest.MonkeyPatch) -> Speaker:
    engine = Speaker(["The sea ", "is grey", "."])
    monkeypatch.setattr(generate, "open_engine", lambda args, progress, **defaults: engine)
    return engine


def run(*arguments: str | Path) -> int:
    """The exit code, argparse's own exits included."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(end.code or 0)


def test_help_teaches_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for command in ("models", "pull", "convert", "generate", "serve", "experiment", "cache", "doctor"):
        assert re.search(rf"^ +{command}\s+\w", text, re.MULTILINE)
        assert run(command, "--help") == 0
    assert capsys.readouterr().out.count("zllm ") > 20


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys; from zllm_jax.cli.app import build_parser; build_parser().format_help(); "
        "print([m for m in ('jax', 'numpy', 'rich', 'yaml', 'starlette', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"zllm {zllm_jax.__version__}\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "required: COMMAND"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["generate"], "--prompt --chat is required"),
        (["generate", "--prompt", "a", "--chat", "b"], "not allowed with"),
        (["generate", "--prompt", "a", "--max-tokens", "many"], "invalid int value"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "temperature is -1.0, must be a number in"),
        (["generate", "--prompt", "a", "--temperature", "nan"], "temperature is nan"),
        (["generate", "--prompt", "a", "--top-p", "2"], "top_p is 2.0"),
        (["generate", "--prompt", "a", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "--prompt", ""], "prompt is empty"),
        (["generate", "--prompt", "a", "--stop", ""], "stop sequences must be non-empty"),
        (["generate", "--prompt", "a", "--set", "max_bach=2"], "max_bach: unknown key (did you mean max_batch?)"),
        (["generate", "--prompt", "a", "--set", "max_batch"], "must be key.path=value"),
        (["generate", "--prompt", "a", "--config", "absent.yaml"], "absent.yaml cannot be read"),
        (["generate", "--chat", "absent.json"], "--chat absent.json cannot be read as JSON"),
        (["serve", "--host", "0.0.0.0"], "--host 0.0.0.0 is reachable from outside: set ZLLM_API_KEY"),
        (["experiment", "run", "absent.yaml"], "absent.yaml cannot be read"),
        (["experiment", "report", "absent"], "give the folder of a finished run"),
        (["cache", "show", "ff"], "no snapshot has an id that starts with 'ff'"),
        (["convert", "x"], "required: --to"),
    ],
)
def test_misuse_ends_with_two_and_says_why(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    zllm_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZLLM_API_KEY", raising=False)
    assert run(*arguments) == 2
    streams = capsys.readouterr()
    assert message in " ".join(streams.err.split())
    assert streams.out == ""


def test_a_failure_ends_with_one_and_one_paragraph(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(name: str, **_: Any) -> Path:
        raise DownloadFailed("cannot fetch it.\n   Go online\nand try again")

    monkeypatch.setattr("zllm_jax.checkpoint.pull", offline)
    assert run("pull", "smollm2-135m") == 1
    assert capsys.readouterr().err == "zllm: cannot fetch it. Go online and try again\n"


def test_an_unknown_model_ends_with_one(zllm_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", "nosuch", "--to", "somewhere") == 1
    assert "smollm2-135m" in capsys.readouterr().err


def test_models_lists_what_is_here(zllm_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "--json") == 0
    models = json.loads(capsys.readouterr().out)
    names = ("smollm2-135m", "gemma3-270m", "deepseek-v4-tokenizer")
    assert {model["name"]: model["pulled"] for model in models} == dict.fromkeys(names, False)
    assert run("models") == 0
    assert re.search(r"smollm2-135m +llama +98\.4 MB +no", capsys.readouterr().out)


def test_generate_streams_text_and_says_how_it_went(speaker: Speaker, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"max-tokens": 7, "temperature": 0.5, "top-k": 3, "top-p": 0.9, "min-p": 0.1, "seed": 4, "stop": "END"}
    assert run("generate", "--prompt", "Hello", *(f"--{name}={value}" for name, value in options.items())) == 0
    streams = capsys.readouterr()
    assert streams.out == "The sea is grey.\n"
    assert "[COMPLETED: 5 prompt tokens, 2 of them cached (cold); first token after 0.250 s" in streams.err
    assert "3 generated, 4.0 tokens/s" in streams.err
    (ticket,) = speaker.tickets
    request = ticket.request
    assert (request.prompt, request.max_tokens, request.stop) == ("Hello", 7, ("END",))
    sampling = dataclasses.asdict(request.sampling)
    assert sampling | {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 4} == sampling
    assert speaker.closed


def test_generate_reads_stdin(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert run("generate", "--prompt", "-") == 0
    assert speaker.tickets[0].request.prompt == "from a pipe"


def test_generate_reads_a_chat(speaker: Speaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text('[{"role": "user", "content": "Hello"}]')
    assert run("generate", "--chat", chat) == 0
    assert speaker.tickets[0].request.messages == ({"role": "user", "content": "Hello"},)
    for wrong in ('{"role": "user"}', "[]", "[1]"):
        chat.write_text(wrong)
        assert run("generate", "--chat", chat) == 2
        assert "must hold a list such as" in capsys.readouterr().err


def test_generate_calls_tools(speaker: Speaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools = tmp_path / "tools.json"
    weather = {"name": "weather", "parameters": {"type": "object"}}
    tools.write_text(json.dumps([weather, {"type": "function", "function": {"name": "now"}}]))
    options = ("--tools", tools, "--tool-choice", "now", "--no-parallel-calls", "--tool-dialect", "dsml")
    speaker.pieces = [
        Delta(text="Let me see.", calls=(CallDelta(index=0, id="c", name="weather"),)),
        Delta(calls=(CallDelta(index=0, arguments='{"city"'), CallDelta(index=0, arguments=': "Oslo"}'))),
        Delta(calls=(CallDelta(index=0, done=True), CallDelta(index=1, id="d", name="now"))),
        Delta(calls=(CallDelta(index=1, malformed="no JSON: x"),)),
    ]
    assert run("generate", "--prompt", "Hello", *options) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines() == ["Let me see.", '-> weather({"city": "Oslo"})', "-> now( [no call: no JSON: x]", ""]
    request = speaker.tickets[0].request
    assert [tool["function"]["name"] for tool in request.tools] == ["weather", "now"]
    assert (request.tool_choice, request.parallel_tool_calls, request.tool_dialect) == (NamedTool("now"), False, "dsml")
    assert run("generate", "--prompt", "Hello", "--tools", tools, "--json") == 0
    assert json.loads(capsys.readouterr().out)["calls"] == [
        {"id": "c", "name": "weather", "arguments": {"city": "Oslo"}}
    ]
    for wrong in ("{}", "[1]", "[]"):
        tools.write_text(wrong)
        assert run("generate", "--prompt", "Hello", "--tools", tools) == 2
        assert "must hold a list such as" in capsys.readouterr().err
    assert run("generate", "--prompt", "Hello", "--tool-choice", "required") == 2
    assert "there are no tools to call" in capsys.readouterr().err


def test_generate_json_is_the_envelope(speaker: Speaker, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--prompt", "Hello", "--json") == 0
    envelope = json.loads(capsys.readouterr().out)
    assert (envelope["status"], envelope["text"]) == ("COMPLETED", "The sea is grey.")
    assert envelope["timing"]["ttft_s"] == 0.25
    assert envelope["usage"]["prefilled_tokens"] == 3
    assert run("generate", "--prompt", "Hello", "--json", "--stream") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "".join(line["text"] for line in lines) == "The sea is grey."
    assert lines[-1]["envelope"]["timing"]["total_s"] == 0.75


@pytest.mark.parametrize("status, code", [(Status.TRUNCATED, 0), (Status.FAULTED, 1), (Status.CANCELED, 1)])
def test_the_status_decides_the_exit_code(
    speaker: Speaker, status: Status, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker.status = status
    assert run("generate", "--prompt", "Hello") == code
    said = capsys.readouterr().err
    assert f"[{status.value}" in said
    assert ("why it failed" in said) == (status is Status.FAULTED)


def test_an_interrupt_cancels_the_call(speaker: Speaker, capsys: pytest.CaptureFixture[str]) -> None:
    speaker.error = KeyboardInterrupt()
    assert run("generate", "--prompt", "Hello") == 130
    assert speaker.tickets[0].canceled
    assert speaker.closed
    assert capsys.readouterr().err.endswith("zllm: interrupted\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = "import sys; from zllm_jax.cli import main; sys.exit(main(['models', '--json']))"
    process = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.close(0); {code}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141
    assert said == b""


def test_experiment_run_fails_with_a_failed_check_and_report_repeats_it(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zllm_jax.experiment import registry
    from zllm_jax.experiment.kind import Kind, Outcome, Table
    from zllm_jax.experiment.results import Check

    @dataclasses.dataclass(frozen=True)
    class Settings:
        ok: bool = True

    def measure(engine: Any, settings: Settings, progress: Any) -> Outcome:
        progress("measure", 1, 1)
        return Outcome([{"x_s": 1.0}], {"x_s": 1.0}, [Check("x is small", settings.ok, "x is 1")], ["a note"])

    table = Table("Times", ("what", "time"), (("x", "1 s"),))
    kind = Kind("tiny", Settings, measure, lambda results: [table], lambda results: [])
    monkeypatch.setitem(registry.KINDS, "tiny", kind)
    monkeypatch.setattr(experiment, "_open_engine", lambda *args: Speaker([]))
    file = tmp_path / "tiny.yaml"
    file.write_text("experiment: tiny\ntitle: Tiny\nclaim: It is small\n")
    assert run("experiment", "run", file, "--out", tmp_path / "out") == 0
    streams = capsys.readouterr()
    assert re.search(r"what +time", streams.out)
    assert f"report: {tmp_path / 'out' / 'report.html'}" in streams.out
    assert streams.err == "zllm: measure ...\n"
    assert run("experiment", "run", file, "--out", tmp_path / "out", "--set", "settings.ok=false") == 1
    assert "FAILED  x is small: x is 1" in capsys.readouterr().out
    assert run("experiment", "report", tmp_path / "out", "--json") == 1
    assert json.loads(capsys.readouterr().out)["checks"] == [{"name": "x is small", "ok": False, "detail": "x is 1"}]
    assert run("experiment", "list", repo / "experiments") == 0
    assert "ttft_restore.yaml" in capsys.readouterr().out


@pytest.fixture
def snapshots(zllm_home: Path) -> list[str]:
    """Two namespaces below the default store; the ids of their snapshots."""
    ids = []
    for name, count in (("one", 5), ("two", 7)):
        store = SnapshotStore(zllm_home / "snapshots", namespace=name)
        ids.append(saved(store, np.arange(count)))
    return ids


def saved(store: SnapshotStore, tokens: Any, base: Base | None = None) -> str:
    """Rows that follow from their tokens; the id."""
    layout = {"paged.k.0": RowSpec(np.dtype(np.float32), (None, 4), token_axis=0)}
    values = np.repeat(np.asarray(tokens, np.float32), 4).reshape(-1, 4)
    return save_whole(store, tokens, layout, {"paged.k.0": values}, base=base).id


def test_cache_lists_shows_and_verifies_every_namespace(
    snapshots: list[str], zllm_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("cache", "ls") == 0
    listed = capsys.readouterr().out
    assert all(id in listed for id in snapshots)
    assert "2 snapshots" in listed
    assert run("cache", "ls", "--json", "--store", zllm_home / "snapshots") == 0
    assert {e["id"]: e["num_tokens"] for e in json.loads(capsys.readouterr().out)} == dict(
        zip(snapshots, (5, 7), strict=True)
    )
    assert run("cache", "show", snapshots[1][:20], "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == snapshots[1]
    assert run("cache", "show", "") == 2
    assert "2 snapshots have" in capsys.readouterr().err
    assert run("cache", "verify") == 0
    assert "2 of 2 snapshots are whole" in capsys.readouterr().out


def chunks_of(store: SnapshotStore, id: str) -> list[Path]:
    manifest = parse(Path(store.where, "manifests", id).read_bytes())
    return [Path(store.where, "chunks", name) for name in manifest.chunks()]


def test_cache_says_what_snapshots_share(zllm_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = SnapshotStore(zllm_home / "snapshots", namespace="n", chunk_tokens=4)
    first = saved(store, np.arange(8))
    second = saved(store, np.arange(12), Base(first, 8))
    assert run("cache", "ls", "--json") == 0
    assert {one["id"]: one["shared_bytes"] for one in json.loads(capsys.readouterr().out)} == {first: 128, second: 128}
    assert run("cache", "ls") == 0
    assert "128 B" in capsys.readouterr().out
    assert run("cache", "rm", first, "--json") == 0
    removed = json.loads(capsys.readouterr().out)
    assert removed["removed"] == [first]
    assert removed["freed_bytes"] < 1000
    assert run("cache", "show", second, "--json") == 0
    assert json.loads(capsys.readouterr().out)["shared_bytes"] == 0
    assert run("cache", "verify") == 0


def test_cache_rm(snapshots: list[str], zllm_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = sorted(path.name for path in (zllm_home / "snapshots").iterdir())
    for wrong, message in (
        ([], "give the ids"),
        (["--all", snapshots[0]], "give the ids"),
        ([snapshots[0], "--namespace", keys[0]], "give the ids"),
        (["--all", "--namespace", ""], "2 namespaces"),
        (["--all", "--namespace", "x"], "0 namespaces"),
        (["zz"], "no snapshot has"),
        ([""], "2 snapshots have"),
    ):
        assert run("cache", "rm", *wrong) == 2
        assert message in capsys.readouterr().err
    assert run("cache", "rm", "--all", "--namespace", keys[0][:12]) == 0
    assert "1 snapshots removed" in capsys.readouterr().out
    assert run("cache", "ls", "--json") == 0
    (left,) = json.loads(capsys.readouterr().out)
    assert left["namespace"] == keys[1]
    assert run("cache", "rm", left["id"][:20], left["id"]) == 0
    assert "1 snapshots removed" in capsys.readouterr().out
    assert run("cache", "rm", "--all") == 0
    assert "0 snapshots removed" in capsys.readouterr().out
    assert not [path for path in (zllm_home / "snapshots").rglob("*/*/*") if path.is_file()]


def test_cache_gc(snapshots: list[str], zllm_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = SnapshotStore(zllm_home / "snapshots", namespace="one")
    (chunk,) = chunks_of(store, snapshots[0])
    Path(store.where, "manifests", snapshots[0]).unlink()
    assert run("cache", "gc") == 0
    assert capsys.readouterr().out == "0 B freed in 2 namespaces\n"  # it may be being written
    assert run("cache", "gc", "--grace", "-1") == 2
    assert chunk.exists()
    assert run("cache", "gc", "--grace", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out)[Path(store.where).name] == 80
    assert not chunk.exists()
    assert run("cache", "verify") == 0
    assert "1 of 1 snapshots are whole" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cache", "ls", "--store", tmp_path / "nowhere") == 2
    assert run("experiment", "list", tmp_path / "nowhere") == 2
    assert capsys.readouterr().err.count("nowhere") == 2


def test_cache_verify_names_what_cannot_be_opened(zllm_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = SnapshotStore(zllm_home / "snapshots", namespace="n")
    good, bad = (saved(store, [seed, 2, 3]) for seed in range(2))
    os.truncate(chunks_of(store, bad)[0], 3)
    for _ in range(2):  # a look repairs nothing, so the second finds the same
        assert run("cache", "verify") == 1
        text = capsys.readouterr().out
        assert f"whole  {good}" in text
        assert re.search(rf"BAD +{bad} .*3 bytes", text)
        assert "1 of 2 snapshots are whole" in text


def test_generate_refuses_bytes_that_are_not_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfehello"), encoding="utf-8"))
    assert run("generate", "--prompt", "-") == 2
    assert "standard input is not UTF-8" in capsys.readouterr().err


def test_cache_verify_finds_a_flipped_bit(
    snapshots: list[str], zllm_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (chunk,) = chunks_of(SnapshotStore(zllm_home / "snapshots", namespace="one"), snapshots[0])
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(bytes(data))
    assert run("cache", "verify", "--json") == 1
    outcome = {entry["id"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert [outcome[id]["ok"] for id in snapshots] == [False, True]


def test_engine_options_meet_the_engine_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    seen = {}

    class Engine:
        @classmethod
        def from_pretrained(cls, model: str, config: Any, *, progress: Any) -> str:
            seen.update(model=model, config=config)
            return "engine"

    monkeypatch.setitem(sys.modules, "zllm_jax.wiring", types.SimpleNamespace(Engine=Engine))
    file = tmp_path / "engine.yaml"
    file.write_text("max_batch: 2\npage_tokens: 32\n")
    parser = __import__("argparse").ArgumentParser()
    engine_options.add_engine_options(parser)
    args = parser.parse_args(["--model", "m", "--config", str(file), "--set", "max_batch=3"])
    assert engine_options.open_engine(args, print, max_batch=1, decode_steps=2) == "engine"
    config = seen["config"]
    assert (seen["model"], config.max_batch, config.page_tokens, config.decode_steps) == ("m", 3, 32, 2)


def test_progress_without_a_terminal_is_a_line_a_thing(capsys: pytest.CaptureFixture[str]) -> None:
    with ConsoleProgress() as progress:
        for done in range(4):
            progress("compile", done, 3)
        progress("measure", 0, 1)
    assert capsys.readouterr().err == "zllm: compile ...\nzllm: measure ...\n"


def test_tables_align_numbers_right_and_words_left(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "count"), [("a", "1"), ("long name", "1,000")])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0].split() == ["name", "count"]
    assert lines[-2].endswith("    1")
    assert lines[-1].startswith(" long name")


@pytest.mark.parametrize("value, text", [(0, "0 B"), (999, "999 B"), (98_362_432, "98.4 MB"), (5e12, "5000.0 GB")])
def test_sizes(value: float, text: str) -> None:
    assert size(value) == text


def test_doctor_prints_all_it_found_and_fails_when_a_folder_is_shut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zllm_jax.cli.doctor import RATES
    from zllm_jax.experiment import doctor
    from zllm_jax.runtime.kernels import KernelChoice

    found = doctor.Diagnosis(
        environment={"python": "3.x", "devices": ["cpu:cpu"]},
        libraries={"numpy": None},
        kernels=(KernelChoice("sampling", "reference (XLA)", "of the platform"),),
        folders=(doctor.Folder("models", "somewhere", 2_000_000, None),),
        rates={**dict.fromkeys(RATES, 2.5e9), "disk_cold_read_bytes_s": None},
    )
    monkeypatch.setattr(doctor, "examine", lambda: found)
    assert run("doctor") == 0
    text = capsys.readouterr().out
    for expected in ("cpu:cpu", "not installed", "of the platform", "2.5 GB/s", "not measurable here", "2.0 MB"):
        assert expected in text
    shut = dataclasses.replace(found, folders=(doctor.Folder("models", "somewhere", 0, "Permission denied"),))
    monkeypatch.setattr(doctor, "examine", lambda: shut)
    assert run("doctor") == 1
    assert "Permission denied" in capsys.readouterr().out
    assert run("doctor", "--json") == 1
    assert json.loads(capsys.readouterr().out)["folders"][0]["problem"] == "Permission denied"
