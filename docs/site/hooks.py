"""Pages of the site that nobody writes: the op reference, and what the docs link to elsewhere.

Links in docs/*.md are those of a repository, so that they work where it is read: to notebooks,
sources, README.  Here each file linked to becomes a page, and links lead to it.
"""

import json
import pathlib
import posixpath
import re
from typing import Any

import reference
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parents[2]
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()([^)\s#]+)(#[^)\s]*)?(\))")
LANGUAGES = {".py": "python", ".txt": "text", ".jsonl": "json"}

origin: dict[str, str] = {}  # page on the site → file in the repository


def on_files(files: Files, config: Any) -> Files:
    """Add the reference and, one after another, files that pages link to."""
    for name, text in reference.pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    origin.clear()
    waiting = []
    for file in list(files):
        if file.is_documentation_page() and not file.src_uri.startswith("reference/"):
            origin[file.src_uri] = f"docs/{file.src_uri}"
            waiting.append((origin[file.src_uri], file.content_string))
    while waiting:
        path, text = waiting.pop()
        for target in linked(path, text):
            uri = page_of(target)
            if uri in origin or target.startswith("docs/"):
                continue
            origin[uri] = target
            content = as_page(ROOT / target)
            files.append(File.generated(config, uri, content=content))
            waiting.append((target, content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to the pages of the site, and the table of ops to the reference."""
    uri = page.file.src_uri
    path = origin.get(uri)
    if path is None:
        return markdown
    if uri == "ops.md":
        markdown = re.sub(r"(?<=\| )`(\w+)\([^`]*`(?= \|)", to_reference, markdown)

    def leads(match: re.Match[str]) -> str:
        target = resolved(path, match[2])
        if target is None:
            return match[0]
        to = posixpath.relpath(page_of(target), posixpath.dirname(uri) or ".")
        return f"{match[1]}{to}{match[3] or ''}{match[4]}"

    return LINK.sub(leads, markdown)


def to_reference(match: re.Match[str]) -> str:
    """A signature as a link to the op's documentation."""
    return f"[{match[0]}](reference/{reference.place(match[1])})"


def resolved(path: str, target: str) -> str | None:
    """The repository's file that a link of another one means."""
    if "://" in target:
        return None
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if (ROOT / found).is_dir():
        found = posixpath.join(found, "README.md")
    return found if not found.startswith("..") and (ROOT / found).is_file() else None


def linked(path: str, text: str) -> list[str]:
    """Files of the repository that a text links to."""
    found = (resolved(path, match[2]) for match in LINK.finditer(text))
    return [target for target in found if target is not None]


def page_of(target: str) -> str:
    """Where the site has a file of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"repository/{target.removesuffix('.md')}.md"


def as_page(path: pathlib.Path) -> str:
    """Markdown as it is, a notebook cell by cell, anything else as a listing."""
    name, text = str(path.relative_to(ROOT)), path.read_text()
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        cells = [(c["cell_type"], "".join(c["source"])) for c in json.loads(text)["cells"]]
        told = [
            source if kind == "markdown" else fenced(source, "python") for kind, source in cells
        ]
        return "\n\n".join([told[0], f"A notebook: `{name}`.", *told[1:]])
    return f"# {name}\n\n{fenced(text, LANGUAGES.get(path.suffix, 'text'))}"


def fenced(text: str, language: str) -> str:
    """A block of code, fenced by more backticks than it has."""
    return f"`````{language}\n{text.rstrip()}\n`````"
