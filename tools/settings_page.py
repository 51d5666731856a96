"""Write docs/settings.md from the configuration: `python tools/settings_page.py`."""

from __future__ import annotations

import json
from pathlib import Path

from dragoman.cli.settings_reference import list_all_settings
from dragoman.config import list_settings
from dragoman.config.root_config import SECTIONS, Config
from dragoman.models.block_catalogue import BLOCKS
from dragoman.models.block_validation import block_options_type

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"


def page() -> str:
    """Draw every section of the configuration as a table."""
    lines = [
        "# Settings",
        "",
        "Made from the code by `python tools/settings_page.py`; a test keeps it current.",
        "",
    ]
    lines += [
        "Set them by `--set model.width=256`, in a YAML file for `--config`, or in Python by",
        '`config.replace(model={"width": 256})`.',
        "",
    ]
    for section in SECTIONS:
        doc = (type(getattr(Config(), section)).__doc__ or "").strip()
        lines += [
            f"## {section}",
            "",
            doc,
            "",
            "| setting | default | allowed values | meaning |",
            "| --- | --- | --- | --- |",
        ]
        for row in list_all_settings():
            if row.path.startswith(f"{section}."):
                default = f"`{row.default}`" if row.default else "empty"
                lines.append(f"| `{row.path}` | {default} | {row.allowed} | {row.sentence} |")
        lines.append("")
    return "\n".join([*lines, *blocks()])


def blocks() -> list[str]:
    """Return the lines on every block and its options."""
    lines = [
        "## Blocks",
        "",
        "`model.encoder` and `model.decoder` are lists of blocks with their options, such as",
        "`[transformer(heads=4)*2, bilstm]`.",
        "",
    ]
    lines += [
        "A setting of the model given here holds for that block alone; other options are its own.",
        "",
    ]
    for name, entry in BLOCKS.items():
        kind = block_options_type(name)
        lines += [f"### {name}", "", entry.summary, ""]
        if kind.overridable:
            lines += [
                f"Of the model's settings: {', '.join(f'`{each}`' for each in kind.overridable)}.",
                "",
            ]
        own = list(list_settings(kind))
        if own:
            lines += [
                "| option | default | allowed values | meaning |",
                "| --- | --- | --- | --- |",
            ]
            for each in own:
                default = json.dumps(each.default).strip('"')
                lines.append(
                    f"| `{each.name}` | `{default}` | {each.allowed()} | {each.setting.doc} |"
                )
            lines.append("")
    return lines


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
