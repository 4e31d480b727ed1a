"""Package metadata with the address of the repository in which the package is built, taken from GitHub's runners.

Built anywhere else, the metadata has no addresses, and the links in README remain unchanged.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {
    "Repository": "",
    "Issues": "/issues",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Security": "/security/policy",
}
CODE = r"(?s:```.*?```)|`[^`\n]*`"
RELATIVE_LINK = re.compile(CODE + r"|(!?)(\[[^\[\]]*\])\((?!\w+:|#)([^()\s]+)\)")


class Addresses(MetadataHookInterface):
    """Fills in ``project.urls``, and ``project.readme`` with links that also work on the page of a package index."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the table ``project`` of pyproject.toml."""
        server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        if server and repository:
            home, version = f"{server}/{repository}", os.environ.get("GITHUB_REF_NAME") or "main"
            metadata["urls"] = {name: home + page for name, page in PAGES.items()}
            readme = absolute(readme, home, version)
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def absolute(text: str, home: str, version: str) -> str:
    """Convert links to files and pictures in Markdown to links to a version in the repository."""

    def link(match: re.Match[str]) -> str:
        picture, label, path = match.groups()
        if path is None:  # code contains no links
            return match[0]
        return f"{picture}{label}({home}/{'raw' if picture else 'blob'}/{version}/{path})"

    return RELATIVE_LINK.sub(link, text)
