"""Writes docs/configuration.md from safe_trainer/config.py; touches nothing else and imports nothing of the project.

Reads the source, not the module: the description of an option is the docstring below its field, and the range stands
in the rules of ``__post_init__``. `python docs/make_configuration.py` renews the page; with `--check` it writes
nothing and exits with 1 if the page is out of date.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "safe_trainer" / "config.py"
PAGE = ROOT / "docs" / "configuration.md"
TOP = "Config"

INTRODUCTION = """\
# Configuration

<!-- Made by docs/make_configuration.py from safe_trainer/config.py: change the docstrings there, then `make docs`. -->

Every option, with the type, the default and the range that it is held to. On the command line an option is
`name=value`, and `section.name=value` in a section: `python -m safe_trainer max_epochs=5 loader.batch_size=128`. In a
program, options are the keys of a mapping, nested or dotted: `SafeTrainer(..., config={"loader.batch_size": 128})`.

The defaults below are those of the library. The command line starts from `conf/config.yaml`, which sets some of them
otherwise; `python -m safe_trainer --cfg job` prints what a run would get.

Every mistake is reported before anything is built, all at once: unknown names, wrong types, values out of range.
"""

WORDS = {"int": "whole number", "float": "number", "bool": "true or false", "str": "text", "None": "null"}


@dataclass(kw_only=True)
class Option:
    """One field of a configuration dataclass, as the page shows it."""

    name: str
    """As in the code, without its section."""
    type: str
    """Source text of the annotation."""
    default: str
    """Source text of the default."""
    text: str
    """The docstring below the field; empty for a section, which is described in its own class."""


@dataclass(kw_only=True)
class Section:
    """One configuration dataclass."""

    text: str
    """Its docstring."""
    options: list[Option] = field(default_factory=list)
    """In the order of the source."""
    rules: dict[str, list[str]] = field(default_factory=dict)
    """What must hold, by the option's name."""


def read(source: str) -> tuple[dict[str, Section], dict[str, list[str]]]:
    """Sections by class name, and the members of each Enum by class name.

    Raises:
        ValueError: an option without a docstring, or a rule about an option that does not exist.
    """
    sections: dict[str, Section] = {}
    choices: dict[str, list[str]] = {}
    lists: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            lists[ast.unparse(node.targets[0])] = ast.unparse(node.value)
        elif isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            if "Enum" in bases:
                choices[node.name] = [
                    ast.unparse(item.targets[0]) for item in node.body if isinstance(item, ast.Assign)
                ]
            elif node.name.endswith("Config") and not bases:
                sections[node.name] = _section(node)
    problems = [
        f"{class_name}.{option.name} has no docstring below it"
        for class_name, section in sections.items()
        for option in section.options
        if not option.text and option.type not in sections
    ]
    for class_name, section in sections.items():
        known = {option.name for option in section.options}
        problems += [f"{class_name} has a rule for {name}, which is no option" for name in section.rules.keys() - known]
    if problems:
        raise ValueError("; ".join(problems))
    for option in (option for section in sections.values() for option in section.options):
        named = re.fullmatch(r"field\(default_factory=lambda: list\((\w+)\)\)", option.default)
        if named is not None:
            option.default = str(list(ast.literal_eval(lists[named[1]])))
    return sections, choices


def _section(node: ast.ClassDef) -> Section:
    section = Section(text=_one_line(ast.get_docstring(node) or ""))
    for item, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign):
            section.options.append(
                Option(
                    name=ast.unparse(item.target),
                    type=ast.unparse(item.annotation),
                    default=ast.unparse(item.value) if item.value else "",
                    text=_one_line(_string(below.value) if isinstance(below, ast.Expr) else ""),
                )
            )
        elif isinstance(item, ast.FunctionDef) and item.name == "__post_init__":
            section.rules = _rules(item)
    return section


def _rules(function: ast.FunctionDef) -> dict[str, list[str]]:
    """Pairs of texts at the head of the tuples in `function`: an option's name and what must hold."""
    rules: dict[str, list[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Tuple) and len(node.elts) == 3:
            name, must = _string(node.elts[0]), _string(node.elts[1])
            if name and must:
                rules.setdefault(name, []).append(must)
    return rules


def _string(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())


def page(source: str) -> str:
    """The whole page, for the source of the schema."""
    sections, choices = read(source)
    top = sections[TOP]
    below = {option.name: option.type for option in top.options if option.type in sections}
    text = [INTRODUCTION, "## Top level\n", *_table(top, choices, leave_out=set(below))]
    text.append("\n## Sections\n")
    text += [f"- [`{name}`](#{name}): {sections[class_name].text}" for name, class_name in below.items()]
    for name, class_name in below.items():
        text += [f"\n### {name}\n", sections[class_name].text + "\n"]
        text += _table(sections[class_name], choices, prefix=f"{name}.")
    return "\n".join(text) + "\n"


def _table(
    section: Section, choices: dict[str, list[str]], *, prefix: str = "", leave_out: set[str] | None = None
) -> list[str]:
    rows = ["| option | type | default | must be | what it does |", "|---|---|---|---|---|"]
    for option in section.options:
        if option.name not in (leave_out or set()):
            must = "; ".join(section.rules.get(option.name, []))
            cells = (
                f"`{prefix}{option.name}`",
                _type(option.type, choices),
                _default(option.default),
                must,
                option.text,
            )
            rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("<", "\\<") for cell in cells) + " |")
    return rows


def _type(annotation: str, choices: dict[str, list[str]]) -> str:
    """An annotation as a user would say it: `int | None` is "whole number, or null"."""
    words = []
    for part in annotation.split(" | "):
        if part in choices:
            words.append(", ".join(f"`{member}`" for member in choices[part]))
        elif part.startswith("list"):
            words.append("list of " + WORDS.get(part[5:-1], part[5:-1]))
        elif part.startswith("dict"):
            words.append("group")
        else:
            words.append(WORDS.get(part, part))
    return ", or ".join(words)


def _default(value: str) -> str:
    """`None` is null, `True` is true, `Mode.train` is train, as YAML and the command line spell them."""
    plain = {"None": "null", "True": "true", "False": "false"}
    if value in plain:
        return f"`{plain[value]}`"
    try:
        return f"`{ast.literal_eval(value)}`"
    except ValueError:
        return f"`{value.rsplit('.', 1)[-1]}`"


def main(arguments: list[str]) -> int:
    """Write the page, or compare it with `--check`; the exit status."""
    text = page(SOURCE.read_text(encoding="utf-8"))
    if "--check" in arguments:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print(
            f"{PAGE.name} is up to date"
            if current
            else f"{PAGE.name} is out of date: python docs/{Path(__file__).name}"
        )
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
