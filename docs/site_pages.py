"""Pages of the site beside those of docs/, and links to sources: a hook of mkdocs.yml."""

import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages at the top of the repository, and their names on the site."""
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)|(!\[[^\]]*\])\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages at the top of the repository."""
    from mkdocs.structure.files import File

    for name, to in PAGES.items():
        files.append(File.generated(config, to, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn the links of a page into those of the site."""
    name = next((name for name, to in PAGES.items() if to == page.file.src_uri), f"docs/{page.file.src_uri}")
    return site_links(markdown, name, config.repo_url)


def site_links(markdown: str, page: str, repo_url: str | None) -> str:
    """Turn links between files of the repository, on one of its pages, into those of the site.

    A link to a source leads to the repository, or is its text alone where there is no address of one.
    """

    def changed(match: re.Match[str]) -> str:
        text, target, image, source = match.groups()
        moved = _moved(page, target or source)
        if image:
            return f"{image}({moved})"
        if moved is not None:
            return f"[{text}]({moved})"
        path = _path(page, target)
        return f"[{text}]({repo_url.rstrip('/')}/blob/main/{path})" if repo_url else text

    return LINK.sub(changed, markdown)


def _path(page: str, target: str) -> str:
    """The file of a link, from the top of the repository."""
    file = target.partition("#")[0]
    return str((ROOT / page).parent.joinpath(file).resolve().relative_to(ROOT)) if file else page


def _moved(page: str, target: str) -> str | None:
    """The target of a link as the site has it, None for a source."""
    if re.match(r"[a-z]+:", target) or target.startswith("#"):
        return target
    path, anchor = _path(page, target), target.partition("#")[2]
    if path not in PAGES and (not path.startswith("docs/") or (ROOT / path).is_dir() or path.endswith(".py")):
        return None
    here = PurePosixPath(PAGES.get(page, page.removeprefix("docs/")))
    there = PAGES.get(path, path.removeprefix("docs/"))
    up = "../" * (len(here.parts) - 1)
    return f"{up}{there}" + (f"#{anchor}" if anchor else "")
