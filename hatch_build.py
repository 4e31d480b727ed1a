"""The project's addresses in the metadata: those of the repository that it is built in, which GitHub's runners name.

Built anywhere else, the metadata has none.
"""

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {
    "Repository": "",
    "Issues": "/issues",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Security": "/security/policy",
}


class Addresses(MetadataHookInterface):
    """Fills in ``project.urls``."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the table ``project`` of pyproject.toml."""
        server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
        of = f"{server}/{repository}" if server and repository else None
        metadata["urls"] = {name: of + page for name, page in PAGES.items()} if of else {}
