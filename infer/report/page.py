"""A report as one HTML file that needs nothing else: style, script and charts are within it.

Texts of models and names from files are escaped by the template, and reach the script as data only.
"""

import base64
import hashlib
from pathlib import Path

import jinja2
from markupsafe import Markup

from .case_study import shades
from .sections import Report
from .svg import draw

TEMPLATE, STYLE, SCRIPT = "page.html.jinja", "page.css", "page.js"


def html(report: Report) -> str:
    """The whole page."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = _read(STYLE), _read(SCRIPT)
    return environment.from_string(_read(TEMPLATE)).render(
        report=report,
        draw=draw,
        shades=shades(report.cases),
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; img-src data:; style-src {_source(style)}; "
        f"script-src {_source(script)}",
    )


def _read(name: str) -> str:
    """A file beside this one, wherever it is installed."""
    return (Path(__file__).parent / name).read_text("utf-8")


def _source(text: str) -> str:
    """How a browser is told to run this script, or use this style, and no other."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
