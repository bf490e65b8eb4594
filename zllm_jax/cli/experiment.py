"""`zllm experiment list | run | report`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from zllm_jax.cli.output import ConsoleProgress, add_json, print_json, print_table

if TYPE_CHECKING:
    from zllm_jax.config import EngineConfig
    from zllm_jax.experiment import Progress, Report

EXAMPLES = """\
examples:
  zllm experiment list
  zllm experiment run experiments/ttft_restore.yaml --quick
  zllm experiment run ttft_restore --set settings.repetitions=5 --set engine.dtype=bfloat16 --out results/bf16
  zllm experiment report results/ttft_restore
"""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "experiment",
        help="measure a claim and report it",
        description="Measure a claim that an experiment file states, check it, and write results and a report.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    lister = actions.add_parser("list", help="the experiments of a folder and what each claims")
    lister.add_argument("folder", nargs="?", default="experiments", help="default: experiments")
    add_json(lister, "them")
    lister.set_defaults(run=_list)

    runner = actions.add_parser(
        "run",
        help="measure one; exit code 1 when one of its checks fails",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    runner.add_argument("file", help="an experiment file, or the name of one in experiments/")
    runner.add_argument("--out", metavar="DIR", help="where results and report go (default: results/NAME)")
    runner.add_argument("--quick", action="store_true", help="the file's short form, for a first look and for CI")
    runner.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change a key of the file, e.g. settings.repetitions=5; may be repeated",
    )
    add_json(runner, "the results")
    runner.set_defaults(run=_run)

    reporter = actions.add_parser("report", help="write the report of a finished run again, from its results.json")
    reporter.add_argument("folder", metavar="DIR", help="the folder that holds results.json")
    add_json(reporter, "the results")
    reporter.set_defaults(run=_report)


def _list(args: argparse.Namespace) -> int:
    from zllm_jax.experiment import list_experiments

    found = list_experiments(args.folder)
    if args.json:
        print_json(
            [{"file": path, "experiment": c.experiment, "title": c.title, "claim": c.claim} for path, c in found]
        )
    else:
        print_table(("file", "title"), [(str(path), config.title) for path, config in found])
    return 0


def _run(args: argparse.Namespace) -> int:
    from zllm_jax.experiment import read_experiment, run_experiment

    config = read_experiment(args.file, overrides=args.set, quick=args.quick)
    with ConsoleProgress() as progress:
        report = run_experiment(config, _open_engine, out=args.out, progress=progress)
    return _show(report, as_json=args.json)


def _open_engine(model: str, config: EngineConfig, progress: Progress) -> Any:
    from zllm_jax.wiring import Engine

    return Engine.from_pretrained(model, config, progress=progress)


def _report(args: argparse.Namespace) -> int:
    from zllm_jax.experiment import rebuild_report

    return _show(rebuild_report(args.folder), as_json=args.json)


def _show(report: Report, *, as_json: bool) -> int:
    results = report.results
    if as_json:
        print_json(results.to_json())
    else:
        for table in report.tables:
            print_table(table.columns, table.rows, title=table.title)
        for check in results.checks:
            print(f"{'held  ' if check.ok else 'FAILED'}  {check.name}: {check.detail}")
        for note in results.notes:
            print(f"note    {note}")
        print(f"\nreport: {report.page}")
    return 0 if results.ok else 1
