"""`zllm cache ls | show | verify`: the snapshots on disk."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zllm_jax.cli.output import add_json, print_json, print_table, size
from zllm_jax.config import zllm_home
from zllm_jax.errors import CacheError, ConfigError, InvalidRequest

if TYPE_CHECKING:
    from zllm_jax.cache.snapshot import SnapshotInfo, SnapshotStore


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "cache",
        help="the conversations' state on disk",
        description="Look at the snapshots that conversations left on disk, and verify them.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("ls", help="the snapshots: tokens, bytes, age")
    listing.set_defaults(run=_ls)
    show = actions.add_parser("show", help="everything known of one")
    show.add_argument("id", metavar="ID", help="as `zllm cache ls` shows it, or its first letters")
    show.set_defaults(run=_show)
    verify = actions.add_parser("verify", help="read every snapshot and check it; exit code 1 when one is bad")
    verify.set_defaults(run=_verify)
    for action, what in ((listing, "them"), (show, "it"), (verify, "the outcome")):
        action.add_argument("--store", metavar="DIR", type=Path, help="default: the snapshots below ZLLM_HOME")
        add_json(action, what)


def _stores(args: argparse.Namespace) -> list[SnapshotStore]:
    """Opened to be looked at: nothing is repaired or removed."""
    from zllm_jax.cache.snapshot import SnapshotStore, keys_below

    root = args.store or zllm_home() / "snapshots"
    if args.store is not None and not args.store.is_dir():
        raise ConfigError(f"--store {args.store} is no folder: give one that holds snapshots, or leave it out")
    return [SnapshotStore(root, namespace=key, repair=False) for key in keys_below(root)]


def _snapshots(args: argparse.Namespace) -> list[tuple[SnapshotStore, SnapshotInfo]]:
    return [(store, info) for store in _stores(args) for info in store.list()]


def _ls(args: argparse.Namespace) -> int:
    found = [info for _, info in _snapshots(args)]
    if args.json:
        print_json([dataclasses.asdict(info) for info in found])
        return 0
    now = time.time()
    print_table(
        ("id", "namespace", "tokens", "size", "last used"),
        [
            (info.id, info.namespace[:8], f"{info.num_tokens:,}", size(info.nbytes), _age(now - info.last_used_s))
            for info in found
        ],
    )
    print(f"{len(found)} snapshots, {size(sum(info.nbytes for info in found))}")
    return 0


def _show(args: argparse.Namespace) -> int:
    matching = [(store, info) for store, info in _snapshots(args) if info.id.startswith(args.id)]
    if len(matching) != 1:
        what = "no snapshot has" if not matching else f"{len(matching)} snapshots have"
        raise InvalidRequest(f"{what} an id that starts with {args.id!r}: see `zllm cache ls`", param="id")
    ((store, info),) = matching
    data = dataclasses.asdict(info) | {"where": store.where}
    if args.json:
        print_json(data)
    else:
        print_table(("snapshot", ""), [(key, str(value)) for key, value in data.items()])
    return 0


def _verify(args: argparse.Namespace) -> int:
    outcome: list[dict[str, Any]] = []
    for store in _stores(args):
        outcome += ({"id": id, "ok": False, "detail": reason} for id, reason in store.broken.items())
        for info in store.list():
            try:
                store.verify(info.id)
            except CacheError as error:
                outcome.append({"id": info.id, "ok": False, "detail": str(error)})
            else:
                detail = f"{info.num_tokens:,} tokens, {size(info.nbytes)}"
                outcome.append({"id": info.id, "ok": True, "detail": detail})
    if args.json:
        print_json(outcome)
    else:
        for entry in outcome:
            print(f"{'whole' if entry['ok'] else 'BAD  '}  {entry['id']}  {entry['detail']}")
        print(f"{sum(bool(entry['ok']) for entry in outcome)} of {len(outcome)} snapshots are whole")
    return 0 if all(entry["ok"] for entry in outcome) else 1


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
