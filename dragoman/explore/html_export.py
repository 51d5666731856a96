"""One self-contained HTML file of the explorer page with one explanation.

Browsers block module imports from `file://`, so the page's ES modules are concatenated, in the
order of their imports, into one inline module script. That needs modules of a simple form, which
`read_modules` checks: `import { a, b } from './x.js';`, declarations exported where they stand, no
import cycles and no top-level name twice. Scripts and styles are allowed by their hashes only.
The explanation is deflated: attention weights are mostly small, so a file shrinks to about half.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dragoman.storage.output_files import write_output

if TYPE_CHECKING:
    from dragoman.explain.explanation import Explanation

STATIC_DIR = Path(__file__).parent / "static"

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
_BYTES = {"u8": 1, "i8": 1, "u16": 2, "u32": 4, "i32": 4, "f32": 4}  # by dtype of a tensor
_LESS = "."  # for the "<" of base 85, which must not stand in a script element
_STRING = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`(?:[^`\\]|\\.)*`)""")
_AROUND = re.compile(r"(?<=\S) ?(=>|[=!]==?|[<>]=?|&&|\|\||\?\?|[=,:?{}();*]) ?(?=\S|$)")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)  # of style sheets
_SPACE = re.compile(r"^(?:[ \t]*(?://.*)?\n|[ \t]+)", re.MULTILINE)
_ISLAND = '<script type="application/json" id="explanation" data-encoding="deflate">'
_STYLESHEET = re.compile(r'<link rel="stylesheet" href="([^"]+)">')
_SCRIPT = re.compile(r'<script([^>]*) src="([^"]+)"([^>]*)></script>')
_TITLE = re.compile(r"<title>[^<]*</title>")
_CHARSET = re.compile(r'<meta charset="utf-8">', re.IGNORECASE)


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
    """Return one module script with everything that `entry` needs, in the order of the imports.

    Comment lines and spaces without a meaning are left out, a fifth of the bytes; names and lines
    stay as they are.
    """
    modules = read_modules(folder)
    return "".join(
        f"// {name}\n{minify_script(modules[name].body)}" for name in order_modules(modules, entry)
    )


def minify_script(text: str) -> str:
    """Return JavaScript without comment lines, indentation and spaces around punctuation.

    A line with a slash outside its strings (a division, a regular expression, a comment) keeps its
    spaces, so that no literal needs to be told from an operator.
    """
    lines = _SPACE.sub("", text).splitlines(keepends=True)
    return "".join(map(_squeeze_line, lines))


def _squeeze_line(line: str) -> str:
    parts = _STRING.split(line)  # strings stand at odd indices
    if any("/" in part for part in parts[::2]):
        return line
    parts[::2] = [_AROUND.sub(r"\1", part) for part in parts[::2]]
    return "".join(parts)


def minify_static_files(folder: Path, minify: Callable[[str, str], str]) -> None:
    """Replace the page's modules by one minified script, in place, and minify its style sheets.

    `setup.py` does this to the files of a wheel, with `minify.string` of tdewolff-minify, which
    takes a media type and a text; a checkout keeps the sources.
    """
    entry = folder / "js" / "main.js"
    modules = read_modules(entry.parent)
    text = "".join(modules[name].body for name in order_modules(modules, entry.name))
    for path in entry.parent.glob("*.js"):
        path.unlink()
    # Names are shortened inside functions only, so all of the script becomes one.
    script = minify("application/javascript", f"(() => {{\n{text}}})();")
    entry.write_text(script, encoding="utf-8")
    for path in folder.glob("*.css"):
        style = minify("text/css", path.read_text(encoding="utf-8"))
        path.write_text(style, encoding="utf-8")


def encode_island(explanation: Explanation | Mapping[str, Any]) -> str:
    """Return the script element with an explanation, deflated and in base 85.

    Inside are its JSON without the data of tensors, a line end, and that data one after the other.
    """
    values = explanation if isinstance(explanation, Mapping) else explanation.to_dict()
    tensors = values.get("tensors", {})
    data = b"".join(base64.b64decode(entry["data"]) for entry in tensors.values())
    bare = {name: {**entry, "data": ""} for name, entry in tensors.items()}
    text = json.dumps(
        {**values, "tensors": bare}, ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )
    packed = zlib.compress(text.encode("utf-8") + b"\n" + data, level=9)
    coded = base64.b85encode(packed).decode("ascii").replace("<", _LESS)
    return f"{_ISLAND}{coded}</script>"


def read_island(page: str) -> dict[str, Any]:
    """Return the explanation of a page of `export_html`; raise ValueError if it has none."""
    start = page.find(_ISLAND)
    if start < 0:
        raise ValueError("the page must be one that dragoman explore --html wrote")
    end = page.index("</script>", start)
    packed = base64.b85decode(page[start + len(_ISLAND) : end].replace(_LESS, "<"))
    text, data = zlib.decompress(packed).split(b"\n", 1)
    values: dict[str, Any] = json.loads(text)
    at = 0
    for entry in values["tensors"].values():
        size = math.prod(entry["shape"]) * _BYTES[entry["dtype"]]
        entry["data"] = base64.b64encode(data[at : at + size]).decode("ascii")
        at += size
    return values


def export_html(
    explanation: Explanation | Mapping[str, Any],
    path: Path | str | None = None,
    *,
    title: str | None = None,
) -> str:
    """Return the explorer page with one explanation as one HTML text; write it if `path` is given.

    The text needs no network and no server: it opens from disk, and its content security policy
    allows nothing but the scripts and styles in it.
    """
    page = (STATIC_DIR / "index.html").read_text(encoding="utf-8")
    scripts: list[str] = []
    styles: list[str] = []

    def inline_style(found: re.Match[str]) -> str:
        styles.append(_SPACE.sub("", _COMMENT.sub("", _read_static(found[1]))))
        return f"<style>{styles[-1]}</style>"

    def inline_script(found: re.Match[str]) -> str:
        if 'type="module"' in found[1] + found[3]:
            file = _static_path(found[2])
            minified = len(list(file.parent.glob("*.js"))) == 1  # see minify_static_files
            scripts.append(
                _read_static(found[2]) if minified else join_modules(file.parent, file.name)
            )
            return f'<script type="module">{scripts[-1]}</script>'
        scripts.append(_read_static(found[2]))
        return f"<script>{scripts[-1]}</script>"

    page = _STYLESHEET.sub(inline_style, page)
    page = _SCRIPT.sub(inline_script, page)
    policy = content_policy(scripts, styles)
    island = encode_island(explanation)
    page = _CHARSET.sub(
        lambda found: f'{found[0]}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        page,
        count=1,
    )
    if title is not None:
        page = _TITLE.sub(lambda _: f"<title>{html.escape(title)}</title>", page, count=1)
    head, body = page.rsplit("</body>", 1)
    page = f"{head}{island}\n</body>{body}"
    if path is not None:
        write_output(Path(path), page.encode("utf-8"))
    return page


def content_policy(scripts: list[str], styles: list[str]) -> str:
    """Return the content security policy that allows these inline scripts and styles alone."""

    def sources(texts: list[str]) -> str:
        return " ".join(f"'sha256-{_hash_base64(text)}'" for text in texts)

    return (
        f"default-src 'none'; script-src {sources(scripts)}; style-src {sources(styles)}; "
        "img-src data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )


def _hash_base64(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _static_path(address: str) -> Path:
    return STATIC_DIR / address.removeprefix("static/")


def _read_static(address: str) -> str:
    text = _static_path(address).read_text(encoding="utf-8")
    if re.search(r"</(?:script|style)|<!--", text, re.IGNORECASE):
        raise ValueError(f"{address}: must have text that can stand inside an HTML element")
    return text
