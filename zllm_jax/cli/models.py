"""`zllm models`, `zllm pull` and `zllm convert`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from zllm_jax.cli.output import ConsoleProgress, add_json, print_json, print_table, size
from zllm_jax.config import Dtype

CONVERT_EXAMPLES = """\
examples:
  zllm convert smollm2-135m --to models/smollm2
  zllm convert path/to/huggingface/folder --to models/mine --dtype bfloat16
  zllm generate --model models/mine --prompt "The sea is"
"""


def add(commands: Any) -> None:
    models: argparse.ArgumentParser = commands.add_parser("models", help="known models, and which are on this machine")
    add_json(models, "them")
    models.set_defaults(run=_models)

    pull: argparse.ArgumentParser = commands.add_parser(
        "pull",
        help="fetch a known model",
        description="Fetch a model and verify its digest; after an interruption, what came so far is used. "
        "hf:ORG/NAME fetches from the Hub and needs the extra `hub`.",
        epilog="example:\n  zllm pull smollm2-135m",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pull.add_argument("name", metavar="NAME", help="see zllm models")
    pull.set_defaults(run=_pull)

    convert: argparse.ArgumentParser = commands.add_parser(
        "convert",
        help="any readable checkpoint -> orbax",
        epilog=CONVERT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    convert.add_argument("source", metavar="DIR|FILE", help="known name, Hugging Face folder or GGUF file")
    convert.add_argument("--to", metavar="DIR", type=Path, required=True, help="a folder that is not there yet")
    convert.add_argument("--dtype", choices=get_args(Dtype), default="float32", help="default: %(default)s")
    convert.set_defaults(run=_convert)


def _models(args: argparse.Namespace) -> int:
    from zllm_jax.checkpoint import is_pulled, known_models

    models = known_models()
    if args.json:
        keys = ("name", "architecture", "size_bytes", "licence", "note")
        print_json([{key: getattr(model, key) for key in keys} | {"pulled": is_pulled(model.name)} for model in models])
        return 0
    print_table(
        ("name", "architecture", "size", "here", "licence", "note"),
        [
            (
                m.name,
                m.architecture or "tokenizer",
                size(m.size_bytes),
                "yes" if is_pulled(m.name) else "no",
                m.licence,
                m.note,
            )
            for m in models
        ],
    )
    return 0


def _pull(args: argparse.Namespace) -> int:
    from zllm_jax.checkpoint import pull

    with ConsoleProgress() as progress:
        path = pull(args.name, progress=lambda done, total: progress(f"fetch {args.name}", done, total))
    print(path)
    return 0


def _convert(args: argparse.Namespace) -> int:
    from zllm_jax.checkpoint import convert, open_checkpoint, resolve

    checkpoint = open_checkpoint(resolve(args.source))
    with ConsoleProgress() as progress:
        path = convert(checkpoint, args.to, args.dtype, lambda done, total: progress("convert", done, total))
    print(path)
    return 0
