"""Pages of the tools: one HTML file, which needs no network."""

from __future__ import annotations

import html
from pathlib import Path


def write_page(path: Path, heading: str, command: str, body: str, *, width_px: int = 1200) -> None:
    """Write the whole page at once: the heading, the command that made it, and ``body``, which is HTML."""
    page = _PAGE.format(
        title=html.escape(heading.lower()),
        heading=html.escape(heading),
        command=html.escape(command),
        body=body,
        width_px=width_px,
    )
    draft = path.with_suffix(".tmp")
    draft.write_text(page, encoding="utf-8")
    draft.replace(path)


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>graphmoe: {title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: {width_px}px; margin: 1em auto; padding: 0 .7em; }}
code {{ background: #f3f4f6; padding: .2em .4em; border-radius: 4px; overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }}
th, td {{ border-bottom: 1px solid #ddd; padding: .3em .8em; text-align: left; vertical-align: top; }}
.wide {{ overflow-x: auto; }}
.wide th, .wide td {{ white-space: nowrap; }}
.figure {{ min-width: 640px; }}
</style>
</head>
<body>
<h1>{heading}</h1>
<p><code>{command}</code></p>
{body}
</body>
</html>
"""
