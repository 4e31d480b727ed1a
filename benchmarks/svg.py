"""SVG pictures for README and the site, in colours that follow a light or dark page. Needs no package."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Point = tuple[float, float]
#: Name of a colour -> its value on a light page and on a dark page. ``docs/extra.css`` selects them by the theme.
COLOURS = {
    "panel": ("#ffffff", "#1e2129"),
    "ink": ("#1f2937", "#e5e7eb"),
    "soft": ("#5b6472", "#a7b0bd"),
    "grid": ("#d9dee5", "#414857"),
    "ours": ("#0b7a70", "#2dd4bf"),
    "plain": ("#b8400b", "#fb923c"),
    "third": ("#4f46e5", "#a5b4fc"),
    "tint": ("#d5efec", "#123f3b"),
    "wash": ("#f1f3f6", "#2a2f3a"),
}


def variables(dark: bool) -> str:
    """Return the CSS variables of all colours."""
    return " ".join(f"--{name}: {values[dark]};" for name, values in COLOURS.items())


STYLE = (
    f"svg.figure {{ {variables(False)} }} @media (prefers-color-scheme: dark) {{ svg.figure {{ {variables(True)} }} }}"
)


class Picture:
    """A drawing of lines, boxes and text; ``str`` returns the SVG document.

    Args:
        width: width in pixels.
        height: height in pixels.
        title: description for readers who do not see the picture.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
        ]
        self.box(0, 0, width, height, fill="panel", radius=6)

    def text(
        self, x: float, y: float, text: str, *, colour: str = "ink", anchor: str = "start", size: float = 13,
        bold: bool = False, mono: bool = False,
    ) -> None:  # fmt: skip
        """Write one line of text with its baseline at y."""
        more = (' font-weight="600"' if bold else "") + (' font-family="ui-monospace, monospace"' if mono else "")
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="var(--{colour})"{more}>'
            f"{escape(text)}</text>"
        )

    def line(self, points: Sequence[Point], *, colour: str = "ink", width: float = 1, dashed: bool = False) -> None:
        """Draw straight lines from point to point."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="var(--{colour})" stroke-width="{width:g}"{dash}/>'
        )

    def dot(self, x: float, y: float, *, colour: str, radius: float = 3.5) -> None:
        """Draw a filled circle."""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="var(--{colour})"/>')

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str, border: str = "", radius: float = 0
    ) -> None:
        """Draw a filled rectangle."""
        stroke = f' stroke="var(--{border})"' if border else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="{radius:g}" '
            f'fill="var(--{fill})"{stroke}/>'
        )

    def arrow(self, start: Point, end: Point, *, colour: str = "soft") -> None:
        """Draw a horizontal or vertical arrow."""
        (x, y), (u, v) = start, end
        self.line([start, end], colour=colour, width=1.5)
        along = ((u > x) - (u < x), (v > y) - (v < y))
        a, b = -6 * along[0], -6 * along[1]
        wings = [(u + a + b / 1.5, v + b + a / 1.5), end, (u + a - b / 1.5, v + b - a / 1.5)]
        self.line(wings, colour=colour, width=1.5)

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"
