"""From results to what people read: a console table, report.md and a self-contained report.html."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template

from zllm_jax.experiment.kind import Kind, Table
from zllm_jax.experiment.plots import Figure, save_figure
from zllm_jax.experiment.results import Results


def write_report(results: Results, kind: Kind, folder: Path) -> Path:
    """Write the plots, report.md and report.html beside results.json; the path of report.html."""
    folder.mkdir(parents=True, exist_ok=True)
    tables, figures = kind.tables(results), kind.figures(results)
    for figure in figures:
        save_figure(figure, folder)
    (folder / "report.md").write_text(_markdown(results, tables, figures), encoding="utf-8")
    path = folder / "report.html"
    path.write_text(_html(results, tables, figures, folder), encoding="utf-8")
    return path


def environment_line(results: Results) -> str:
    """One line: processor, devices, versions, commit, date; what an older results.json lacks is left out."""
    env = results.environment
    parts = [
        f"{env['cpu']} ({env['cores']} cores)" if "cores" in env else env.get("cpu"),
        ", ".join(env.get("devices", ())),
        f"jax {env.get('jax')}",
        f"Python {env.get('python')}",
        f"zllm {env.get('zllm')}" + (f" at {env['commit']}" if env.get("commit") else ""),
        env.get("date"),
    ]
    return " · ".join(part for part in parts if part)


def _markdown(results: Results, tables: Sequence[Table], figures: Sequence[Figure]) -> str:
    lines = [f"# {results.title}", "", results.claim, "", environment_line(results), ""]
    for table in tables:
        lines += [f"## {table.title}", "", _markdown_row(table.columns)]
        lines.append("|" + "|".join([" --- "] + [" ---: "] * (len(table.columns) - 1)) + "|")
        lines += [*map(_markdown_row, table.rows), ""]
    for figure in figures:
        lines += [f"![{figure.caption}]({figure.name}.svg)", "", figure.caption, ""]
    lines += ["## Checks", ""]
    lines += [f"- {'held' if c.ok else '**FAILED**'}: {c.name}. {c.detail}" for c in results.checks] + [""]
    if results.notes:
        lines += ["## Notes", "", *(f"- {note}" for note in results.notes), ""]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _html(results: Results, tables: Sequence[Table], figures: Sequence[Figure], folder: Path) -> str:
    template = Template(resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8"))
    held = sum(check.ok for check in results.checks)
    return template.substitute(
        title=html.escape(results.title),
        claim=html.escape(results.claim),
        environment=html.escape(environment_line(results)),
        verdict_class="ok" if results.ok else "bad",
        verdict=f"{held} of {len(results.checks)} checks held",
        figures="\n".join(_html_figure(figure, folder) for figure in figures),
        tables="\n".join(map(_html_table, tables)),
        checks="\n".join(
            f'<li class="{"ok" if c.ok else "bad"}"><b>{html.escape(c.name)}</b> {html.escape(c.detail)}</li>'
            for c in results.checks
        ),
        notes="\n".join(f"<li>{html.escape(note)}</li>" for note in results.notes) or "<li>none</li>",
        config=html.escape(json.dumps(results.config, indent=1)),
    )


def _html_figure(figure: Figure, folder: Path) -> str:
    # As a data address, not inline: ids of one SVG then cannot meet those of another.
    picture = base64.b64encode((folder / f"{figure.name}.svg").read_bytes()).decode()
    caption = html.escape(figure.caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/svg+xml;base64,{picture}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table.rows)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    title = html.escape(table.title)
    return f"<h2>{title}</h2>\n<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
