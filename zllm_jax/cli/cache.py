"""`zllm cache ls | show | verify | gc | rm`: the snapshots on disk."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zllm_jax.cli.output import add_json, print_json, print_table, size
from zllm_jax.config import zllm_home
from zllm_jax.errors import CacheError, ConfigError, InvalidRequest

if TYPE_CHECKING:
    from zllm_jax.cache.snapshot import SnapshotInfo, SnapshotStore

EXAMPLES = """examples:
  zllm cache ls
  zllm cache show 4f2a                          the first letters of an id are enough
  zllm cache verify --store /data/snapshots     another folder than the one below ZLLM_HOME
  zllm cache rm --all --namespace 1c9e          what a model left that is used no more
"""

Found = tuple["SnapshotStore", "SnapshotInfo"]


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "cache",
        help="the conversations' state on disk",
        description="Look at the snapshots that conversations left on disk, verify and remove them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("ls", help="the snapshots: tokens, bytes, what is shared, age")
    listing.set_defaults(run=_ls)
    show = actions.add_parser("show", help="everything known of one")
    show.add_argument("id", metavar="ID", help="as `zllm cache ls` shows it, or its first letters")
    show.set_defaults(run=_show)
    verify = actions.add_parser("verify", help="read every snapshot and check it; exit code 1 when one is bad")
    verify.set_defaults(run=_verify)
    gc = actions.add_parser("gc", help="remove files that no snapshot needs, left by crashes")
    gc.add_argument(
        "--grace",
        metavar="SECONDS",
        type=float,
        default=3600.0,
        help="spare files younger than this, which may be being written (default: 3600)",
    )
    gc.set_defaults(run=_gc)
    rm = actions.add_parser("rm", help="remove snapshots, and the files that no other needs")
    rm.add_argument("ids", metavar="ID", nargs="*", help="as `zllm cache ls` shows it, or its first letters")
    rm.add_argument("--all", action="store_true", help="every snapshot")
    rm.add_argument("--namespace", metavar="KEY", help="with --all: of this namespace only, or its first letters")
    rm.set_defaults(run=_rm)
    actions_and_words = (
        (listing, "them"),
        (show, "it"),
        (verify, "the outcome"),
        (gc, "what was freed"),
        (rm, "what was removed"),
    )
    for action, what in actions_and_words:
        action.add_argument("--store", metavar="DIR", type=Path, help="default: the snapshots below ZLLM_HOME")
        add_json(action, what)


def _stores(args: argparse.Namespace, grace_s: float = 3600.0) -> list[SnapshotStore]:
    """Opened to be looked at: nothing is repaired or removed."""
    from zllm_jax.cache.snapshot import SnapshotStore, keys_below

    root = args.store or zllm_home() / "snapshots"
    if args.store is not None and not args.store.is_dir():
        raise ConfigError(f"--store {args.store} is no folder: give one that holds snapshots, or leave it out")
    return [SnapshotStore(root, namespace=key, grace_s=grace_s, repair=False) for key in keys_below(root)]


def _snapshots(args: argparse.Namespace) -> list[Found]:
    return [(store, info) for store in _stores(args) for info in store.list()]


def _one(found: Sequence[Found], id: str) -> Found:
    matching = [one for one in found if one[1].id.startswith(id)]
    if len(matching) != 1:
        what = "no snapshot has" if not matching else f"{len(matching)} snapshots have"
        raise InvalidRequest(f"{what} an id that starts with {id!r}: see `zllm cache ls`", param="id")
    return matching[0]


def _as_data(store: SnapshotStore, info: SnapshotInfo) -> dict[str, Any]:
    return dataclasses.asdict(info) | {"shared_bytes": info.nbytes - store.own_bytes(info.id)}


def _ls(args: argparse.Namespace) -> int:
    stores = _stores(args)
    found = [(store, info) for store in stores for info in store.list()]
    if args.json:
        print_json([_as_data(*one) for one in found])
        return 0
    now = time.time()
    print_table(
        ("id", "namespace", "tokens", "size", "shared", "last used"),
        [
            (
                info.id,
                info.namespace[:8],
                f"{info.num_tokens:,}",
                size(info.nbytes),
                size(info.nbytes - store.own_bytes(info.id)),
                _age(now - info.last_used_s),
            )
            for store, info in found
        ],
    )
    print(f"{len(found)} snapshots, {size(sum(store.nbytes for store in stores))}")
    return 0


def _show(args: argparse.Namespace) -> int:
    store, info = _one(_snapshots(args), args.id)
    data = _as_data(store, info) | {"where": store.where}
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


def _gc(args: argparse.Namespace) -> int:
    if not args.grace >= 0:
        raise InvalidRequest(f"--grace is {args.grace}, must be seconds, at least 0", param="grace")
    stores = _stores(args, args.grace)
    freed = {Path(store.where).name: store.gc() for store in stores}
    if args.json:
        print_json(freed)
    else:
        print(f"{size(sum(freed.values()))} freed in {len(freed)} namespaces")
    return 0


def _rm(args: argparse.Namespace) -> int:
    if args.all == bool(args.ids) or (args.namespace is not None and not args.all):
        raise InvalidRequest("give the ids of snapshots, or --all, perhaps with --namespace KEY", param="ids")
    found = _snapshots(args)
    if args.all:
        namespaces = {info.namespace for _, info in found if info.namespace.startswith(args.namespace or "")}
        if args.namespace is not None and len(namespaces) != 1:
            raise InvalidRequest(
                f"{len(namespaces)} namespaces with snapshots start with {args.namespace!r}: see `zllm cache ls`",
                param="namespace",
            )
        chosen = [one for one in found if one[1].namespace in namespaces]
    else:
        chosen = list({info.id: (store, info) for store, info in (_one(found, id) for id in args.ids)}.values())
    before = {store.where: store.nbytes for store, _ in chosen}
    for store, info in chosen:
        store.delete(info.id)
    freed = sum(before.values()) - sum({store.where: store.nbytes for store, _ in chosen}.values())
    if args.json:
        print_json({"removed": [info.id for _, info in chosen], "freed_bytes": freed})
    else:
        print(f"{len(chosen)} snapshots removed, {size(freed)} freed")
    return 0


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
