"""Write docs/settings.md from the configuration: `python tools/settings_page.py`."""

from __future__ import annotations

from pathlib import Path

from dragoman.cli.settings import every_setting
from dragoman.config.tree import SECTIONS, Config

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"


def page() -> str:
    """Draw every section of the configuration as a table."""
    lines = ["# Settings", "", "Made from the code by `python tools/settings_page.py`; a test keeps it current.", ""]
    lines += ['Give them as `--set model.width=256`, in a YAML file for `--config`, or as `config.replace(model={"width": 256})`.', ""]
    for section in SECTIONS:
        doc = (type(getattr(Config(), section)).__doc__ or "").strip()
        lines += [f"## {section}", "", doc, "", "| setting | default | may be | meaning |", "| --- | --- | --- | --- |"]
        for row in every_setting():
            if row.path.startswith(f"{section}."):
                default = f"`{row.default}`" if row.default else "empty"
                lines.append(f"| `{row.path}` | {default} | {row.allowed} | {row.sentence} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
