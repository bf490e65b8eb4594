"""Token tables as bytes, and back: what a cache on disk keeps. Bytes that are not whole are refused."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from zllm_jax.errors import CacheError
from zllm_jax.fence.machine import Condition, Edge, Machine
from zllm_jax.fence.tables import TokenTables
from zllm_jax.fence.vocabulary import Vocabulary

_ARRAYS = tuple(one.name for one in fields(TokenTables) if one.name not in ("machine", "vocabulary"))
_DIGEST_BYTES = 32


def tables_to_bytes(tables: TokenTables, note: Mapping[str, Any]) -> bytes:
    """note: JSON that is kept beside them."""
    machine = tables.machine
    about = {
        "note": note,
        "start": machine.start,
        "special": [asdict(edge) for edge in machine.special],
        "returns": machine.returns,
        "vocabulary": tables.vocabulary.digest,
    }
    arrays = {name: getattr(tables, name) for name in _ARRAYS}
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("about.json", json.dumps(about))
        for name, array in {**arrays, "edges": machine.edges, "accepting": machine.accepting}.items():
            with file.open(f"{name}.npy", "w") as one:
                np.lib.format.write_array(one, np.ascontiguousarray(array), allow_pickle=False)
    content = held.getvalue()
    return hashlib.sha256(content).digest() + content


def tables_from_bytes(data: bytes, vocabulary: Vocabulary) -> tuple[TokenTables, Mapping[str, Any]]:
    """The tables and their note. Raises `CacheError` where the bytes are damaged, or of another vocabulary."""
    content = data[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != data[:_DIGEST_BYTES]:
        raise CacheError("stored tables of a fence are damaged")
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        about = json.loads(file.read("about.json"))
        if about["vocabulary"] != vocabulary.digest:
            raise CacheError("stored tables of a fence are of another vocabulary")
        arrays = {}
        for name in (*_ARRAYS, "edges", "accepting"):
            with file.open(f"{name}.npy") as one:
                arrays[name] = np.lib.format.read_array(io.BytesIO(one.read()), allow_pickle=False)
    special = tuple(_edge(one) for one in about["special"])
    returns = tuple(tuple(row) for row in about["returns"])
    machine = Machine(arrays.pop("edges"), arrays.pop("accepting"), about["start"], special, returns)
    return TokenTables(machine, vocabulary, **arrays), about["note"]


def _edge(plain: Mapping[str, Any]) -> Edge:
    otherwise = plain["otherwise"]
    guard = tuple(Condition(**one) for one in plain["guard"])
    return Edge(**{**plain, "guard": guard, "otherwise": None if otherwise is None else _edge(otherwise)})
