"""Build the explorer page: write `dragoman/explore/static/` from its sources in `explore/page/`.

    python tools/build_explorer_page.py     # or: make page

The built page is committed, so that a checkout, an sdist and every wheel have the same files, and
only who changes the page needs the minifier: tdewolff-minify of the version in constraints.txt,
because other versions write other bytes. `static/vendor/` stays as it is.

The ES modules become one script, in the order of their imports: browsers block module imports from
`file://`, and names are shortened inside functions only. That needs modules of a simple form, which
`read_modules` checks: `import { a, b } from './x.js';`, declarations exported where they stand, no
import cycles and no top-level name twice.
"""

from __future__ import annotations

import importlib.metadata
import re
import string
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE_DIR = ROOT / "dragoman" / "explore" / "page"
STATIC_DIR = ROOT / "dragoman" / "explore" / "static"
STYLESHEETS = ("app.css", "panels.css")  # in the order of their rules
MINIFIER = "tdewolff-minify"

_IMPORT = re.compile(r"^import \{([\w\s,$]+)\} from '\./([\w-]+\.js)';\n?", re.MULTILINE)
_DECLARATION = re.compile(
    r"^(export )?(?:(?:async )?function\*? |const |let |class )([A-Za-z_$][\w$]*)", re.MULTILINE
)
_FORBIDDEN = (
    (re.compile(r"^import\b.*", re.MULTILINE), "import { a, b } from './x.js';"),
    (re.compile(r"^export (?!(?:async )?function |const |class ).*", re.MULTILINE), "export const"),
    (re.compile(r"^(?:export )?(?:const|let|var) ?[\[{].*", re.MULTILINE), "one name a const"),
    (re.compile(r"^var .*", re.MULTILINE), "const"),
    (re.compile(r"\bimport(?:\(|\.meta).*"), "a static import"),
    (re.compile(r"</script|<!--", re.IGNORECASE), "text that can stand in an HTML script"),
)
_GLOBALS = (  # as parameters they get short names
    "Array, Boolean, Float32Array, Math, Number, Object, Set, String, Uint32Array, Uint8Array, "
    "document, encodeURIComponent, location"
)
_MEMBERS = re.compile(  # of objects that modules hand to each other; in no browser and no JSON
    r"\b(addAttribution|announce|attentionMean|attributionRow|colLabels|crossRow|crossSites|headEffect"
    r"|hasClasses|headSummary|isPooled|onExplanation|outputToken|rowLabels|siteMatrix|sourceWeights"
    r"|strongestHead)\b"
)
_CONST = re.compile(r"^( *(?:for (?:await )?\()?)const ", re.MULTILINE)
_HTML_OPTIONS = {  # markup that `html_export` and parsers of XML-like HTML find
    "html-keep-default-attr-vals": True,
    "html-keep-document-tags": True,
    "html-keep-end-tags": True,
    "html-keep-quotes": True,
}


@dataclass(frozen=True, slots=True)
class PageModule:
    """One ES module of the page: its text without imports, and what it takes and declares."""

    name: str
    body: str
    imports: dict[str, tuple[str, ...]]  # module -> names
    declared: tuple[str, ...]  # top-level names
    exported: frozenset[str]


def read_module(name: str, text: str) -> PageModule:
    """Return a module of the page; raise ValueError if it has a form that cannot be joined."""
    imports: dict[str, tuple[str, ...]] = {}
    for found in _IMPORT.finditer(text):
        names = tuple(each.strip() for each in found[1].split(",") if each.strip())
        if renamed := [each for each in names if not re.fullmatch(r"[\w$]+", each)]:
            raise ValueError(f"{name}: imports must keep their names; found {renamed[0]!r}")
        imports[found[2]] = imports.get(found[2], ()) + names
    body = _IMPORT.sub("", text)
    for pattern, wanted in _FORBIDDEN:
        if found_line := pattern.search(body):
            raise ValueError(f"{name}: must have {wanted!r}; found {found_line[0][:80]!r}")
    if odd := [line for line in body.splitlines() if line.count("`") % 2]:
        raise ValueError(f"{name}: a template string must end on its line; found {odd[0][:80]!r}")
    declarations = list(_DECLARATION.finditer(body))
    return PageModule(
        name=name,
        body=re.sub(r"^export (?=(?:async )?function |const |class )", "", body, flags=re.M),
        imports=imports,
        declared=tuple(each[2] for each in declarations),
        exported=frozenset(each[2] for each in declarations if each[1]),
    )


def read_modules(folder: Path) -> dict[str, PageModule]:
    """Return the page's modules by file name; raise ValueError if they cannot be joined."""
    modules = {
        path.name: read_module(path.name, path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.js"))
    }
    owners: dict[str, str] = {}
    for module in modules.values():
        for name in module.declared:
            if name in owners:
                raise ValueError(
                    f"top-level names must be unique; found {name} in {owners[name]} and "
                    f"{module.name}"
                )
            owners[name] = module.name
        for source, names in module.imports.items():
            for name in names:
                if source not in modules or name not in modules[source].exported:
                    raise ValueError(
                        f"{module.name}: imports must be exported; found no {name} in {source}"
                    )
    return modules


def order_modules(modules: Mapping[str, PageModule], entry: str) -> list[str]:
    """Return what `entry` needs, each module after its imports; raise ValueError on a cycle."""
    order: list[str] = []
    path: list[str] = []

    def visit(name: str) -> None:
        if name in order:
            return
        if name in path:
            cycle = " -> ".join([*path[path.index(name) :], name])
            raise ValueError(f"imports must have no cycle; found {cycle}")
        path.append(name)
        for source in modules[name].imports:
            visit(source)
        order.append(path.pop())

    visit(entry)
    return order


def join_modules(folder: Path, entry: str = "main.js") -> str:
    """Return one function with everything that `entry` needs, in the order of the imports."""
    modules = read_modules(folder)
    body = "".join(modules[name].body for name in order_modules(modules, entry))
    if quoted := re.search(rf"""['"`]{_MEMBERS.pattern}['"`]""", body):
        raise ValueError(f"a member whose name is shortened must not be quoted; found {quoted[0]}")
    short: dict[str, str] = {}
    body = _MEMBERS.sub(lambda each: short.setdefault(each[0], f"${len(short):x}"), body)
    # No module assigns to a const, and `let` is shorter.
    body = _CONST.sub(r"\1let ", body)
    return f"(({_GLOBALS}) => {{\n{body}}})({_GLOBALS});"


def shorten_properties(styles: str, scripts: str) -> str:
    """Return the style sheet with short custom properties, as the minifier leaves them alone:
    without spaces after commas, and with short names where no script uses them.
    """
    styles = re.sub(r"--[\w-]+:[^;}]*", lambda each: re.sub(r",\s+", ",", each[0]), styles)
    used = set(re.findall(r"--([a-z][\w-]*)", scripts))
    used.update(re.findall(r"'([a-z]+-[\w-]*)'", scripts))  # 'accent-soft', for `themeColor`
    for found in re.finditer(r"\bvar: \{([^}]*)\}", scripts):
        used.update(re.findall(r"(\w+):", found[1]))
    families = tuple(re.findall(r"themeColor\(`([a-z]+-)\$", scripts))
    names = dict.fromkeys(re.findall(r"--([a-z][\w-]*)", styles))
    free = [name for name in names if name not in used and not name.startswith(families)]
    letters = (a + b for a in ("", *string.ascii_lowercase) for b in string.ascii_lowercase)
    short = dict(zip(free, (each for each in letters if each not in names)))
    return re.sub(r"--([a-z][\w-]*)", lambda each: f"--{short.get(each[1], each[1])}", styles)


def check_minifier() -> None:
    """Raise RuntimeError if the minifier is not the one that wrote the committed page."""
    pinned = re.search(rf"^{MINIFIER}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned, f"constraints.txt must pin {MINIFIER}"
    try:
        found = importlib.metadata.version(MINIFIER)
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != pinned[1]:
        raise RuntimeError(
            f"the explorer page is built by {MINIFIER} {pinned[1]}; found {found}; "
            f"run: python -m pip install {MINIFIER}=={pinned[1]}"
        )


def link_built_files(folder: Path) -> str:
    """Return index.html with the built files in place of the sources; raise ValueError if it has
    no link to one of them.
    """
    page = (folder / "index.html").read_text(encoding="utf-8")
    links = [f'<link rel="stylesheet" href="static/{name}">\n' for name in STYLESHEETS]
    for old, new in (
        ("".join(links), '<link rel="stylesheet" href="static/explorer.css">\n'),
        ('src="static/js/main.js"', 'src="static/explorer.js"'),
    ):
        if old not in page:
            raise ValueError(f"index.html: must have {old!r}")
        page = page.replace(old, new)
    return page


def build_page(folder: Path = SOURCE_DIR) -> dict[str, str]:
    """Return the built files by name: index.html, one script and one style sheet.

    Raise RuntimeError without the pinned minifier, ValueError if the modules cannot be joined.
    """
    check_minifier()
    import minify

    minify.config(_HTML_OPTIONS)
    styles = "".join((folder / name).read_text(encoding="utf-8") for name in STYLESHEETS)
    script = join_modules(folder / "js")
    styles = shorten_properties(minify.string("text/css", styles), script)
    return {
        "explorer.css": styles + "\n",
        "explorer.js": minify.string("application/javascript", script) + "\n",
        "index.html": minify.string("text/html", link_built_files(folder)) + "\n",
    }


def main() -> int:
    """Write the built page."""
    try:
        files = build_page()
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for name, text in files.items():
        (STATIC_DIR / name).write_bytes(text.encode("utf-8"))
    size = sum(path.stat().st_size for path in STATIC_DIR.rglob("*") if path.is_file())
    print(f"{STATIC_DIR.relative_to(ROOT)}: {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
