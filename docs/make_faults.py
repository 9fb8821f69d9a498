"""Make faults.md, debugging-checklist.md and debugging-prompt.md from the catalogue; `--check` only compares.

Run: python docs/make_faults.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from safe_trainer.catalogue import CATALOGUE, Fault
from safe_trainer.debugging import BUGS, CHECKLIST, SYMPTOMS, TREE

FOLDER = Path(__file__).parent
MADE = "<!-- Made by docs/make_faults.py from safe_trainer/catalogue.py and safe_trainer/debugging.py. -->\n"
LATER = "comes with a later version"


def faults() -> str:
    """The catalogue, a section for each group."""
    text = [
        MADE,
        "# Faults\n",
        "Each finding has one of these ids. `python -m safe_trainer mode=explain fault=ID` prints an entry.\n",
    ]
    group = ""
    for fault in CATALOGUE.values():
        if fault.group != group:
            group = fault.group
            text.append(f"## {group}\n")
        text.append(entry(fault))
    return "\n".join(text)


def entry(fault: Fault) -> str:
    """One entry in Markdown."""
    lines = [
        f"### {fault.id}\n",
        f"{fault.title}.\n",
        f"- **Established by:** {fault.established}{'' if fault.live else f' ({LATER})'}",
    ]
    lines.append("- **Likely causes:** " + "; ".join(fault.causes))
    lines.append("- **Remedies:** " + "; ".join(fault.remedies))
    if fault.looks_like_it:
        lines.append(f"- **Looks like it and is healthy:** {fault.looks_like_it}")
    return "\n".join(lines) + "\n"


def checklist() -> str:
    """The decision tree as a chart, the tables, and what to do before a full training."""
    rows = [MADE, "# Debugging checklist\n", "## Where to begin\n", "```mermaid", "flowchart TD"]
    leaves = 0
    for fork in TREE:
        rows.append(f'    {fork.name}{{"{fork.question}"}}')
        for answer, target in fork.answers:
            if any(target == other.name for other in TREE):
                rows.append(f'    {fork.name} -->|"{answer}"| {target}')
            else:
                leaves += 1
                rows.append(f'    {fork.name} -->|"{answer}"| leaf{leaves}["{target}"]')
    rows += ["```\n", "## Before a full training\n", *(f"- [ ] {item}" for item in CHECKLIST), ""]
    rows += ["## Symptoms\n", "| seen | likely causes | first thing to try | faults |", "|---|---|---|---|"]
    rows += [f"| {s.seen} | {s.causes} | {s.first} | {links(s.faults)} |" for s in SYMPTOMS]
    rows += ["\n## Common bugs\n", "| mistake | symptom | mend | faults |", "|---|---|---|---|"]
    rows += [f"| {b.mistake} | {b.symptom} | {b.mend} | {links(b.faults)} |" for b in BUGS]
    return "\n".join(rows) + "\n"


def prompt() -> str:
    """What to hand to a language model, with a run's findings."""
    ids = "\n".join(f"- {fault.id}: {fault.title.lower()}; proof: {fault.established}" for fault in CATALOGUE.values())
    return f"""{MADE}
# A prompt to go on with

Paste a run's findings, its configuration and the code of model and loss into the places below.

```text
You are an engineer who debugs the training of neural networks in PyTorch. Below are the findings of a run, each with
its evidence, and the program. Work like this:

1. Take the evidence at its word; it was measured. A finding under "explains" is a symptom of the one it stands under.
2. Name the one cause that explains most, with the line of code. If two remain, say which experiment tells them apart:
   one that takes less than a minute (overfit one batch, one step in float64, five samples, the same seed with a tenth
   of the rate).
3. Give the smallest change that mends it, as a diff, and say what must be seen afterwards if you are right.
4. Do not advise what the evidence speaks against. If it is too thin, say what to measure next.

Faults that are told apart:
{ids}

FINDINGS (from the terminal, or metrics.jsonl):
<paste>

CONFIGURATION (config.yaml of the run):
<paste>

CODE:
<paste>
```
"""


def links(ids: tuple[str, ...]) -> str:
    """References into faults.md."""
    return ", ".join(f"[{name}](faults.md#{name.replace('.', '')})" for name in ids)


PAGES = {"faults.md": faults, "debugging-checklist.md": checklist, "debugging-prompt.md": prompt}


def main(arguments: list[str]) -> int:
    """Write the pages, or with --check say which are out of date; exit status 1 if one is."""
    outdated = [name for name, make in PAGES.items() if _read(FOLDER / name) != make()]
    if "--check" in arguments:
        print(*(f"{name} is out of date: python docs/make_faults.py" for name in outdated), sep="\n")
        return bool(outdated)
    for name in outdated:
        (FOLDER / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"wrote docs/{name}")
    return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
