"""``python -m build_tools.index_page ADDRESS TAG``: README.md and pyproject.toml for an index.

In a checkout the links and images of README.md are files beside it. A package index shows the page
without these files. So the release, which knows the repository's address, writes them as addresses
of its files at the tag, ``ADDRESS/blob/TAG/...`` and ``ADDRESS/raw/TAG/...``, and adds the
project's addresses to pyproject.toml. Neither change is committed.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def with_addresses(text: str, address: str, tag: str) -> str:
    """The page, its relative links and images as addresses. Links within the page stay."""

    def link(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        if target.startswith("#") or re.match(r"\w+:", target):
            return found[0]
        return f"{image}[{label}]({address}/{'raw' if image else 'blob'}/{tag}/{target})"

    return _LINK.sub(link, text)


def urls(address: str, tag: str) -> str:
    """The table of pyproject.toml that holds a project's addresses."""
    pages = {
        "Source": address,
        "Issues": f"{address}/issues",
        "Documentation": f"{address}/tree/{tag}/docs",
        "Changes": f"{address}/blob/{tag}/CHANGELOG.md",
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in pages.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="of the repository, such as https://host/owner/name")
    parser.add_argument("tag", help="or any other name of the commit that is released")
    arguments = parser.parse_args()
    readme, project = ROOT / "README.md", ROOT / "pyproject.toml"
    readme.write_text(with_addresses(readme.read_text(), arguments.address, arguments.tag))
    if "[project.urls]" not in project.read_text():
        project.write_text(project.read_text() + urls(arguments.address, arguments.tag))


if __name__ == "__main__":
    main()
