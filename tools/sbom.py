"""Writes what a release stands on: CycloneDX documents of the libraries that perfmodel and each of its extras run with.

    .venv/bin/python tools/sbom.py dist/sbom

One file per extra, and `perfmodel.cdx.json` of the package without any: what is required, and what that requires in
turn, each with version, licence and package URL, as installed in the environment that runs this. cyclonedx-py describes
that environment; here it is cut to each extra's share, and held against CycloneDX's schema, which the library brings
along: nothing is fetched. An extra of which something is not installed is named and left out.
"""

__all__: list[str] = []

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement

PACKAGE = "perfmodel"
FOR_DEVELOPERS = {"test", "check", "publish", "docs"}
_VERSION = SchemaVersion.V1_6


def normalised(name: str) -> str:
    """A project's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required(name: str, extras: frozenset[str]) -> list[Requirement]:
    """What a distribution requires here, with these extras. Raises PackageNotFoundError where it is not installed."""
    wanted = [Requirement(line) for line in distribution(name).requires or ()]
    choices = [{"extra": extra} for extra in sorted(extras) or [""]]
    return [item for item in wanted if item.marker is None or any(map(item.marker.evaluate, choices))]


def closure(extra: str) -> set[str]:
    """The names of all that perfmodel, with an extra or without ("") any, runs with, but for itself."""
    todo = [(PACKAGE, frozenset({extra} - {""}))]
    seen = set(todo)
    while todo:
        for item in required(*todo.pop()):
            result = (normalised(item.name), frozenset(item.extras))
            if result not in seen:
                seen.add(result)
                todo.append(result)
    return {name for name, _ in seen} - {PACKAGE}


def share(whole: dict[str, Any], names: set[str], direct: set[str]) -> dict[str, Any]:
    """The part of an environment's document that names `names`; direct: what perfmodel itself asks for."""
    kept = [item for item in whole["components"] if normalised(item["name"]) in names]
    refs = {item["bom-ref"]: normalised(item["name"]) for item in kept}
    root = whole["metadata"]["component"]["bom-ref"]
    edges = [
        {**item, "dependsOn": [ref for ref in item.get("dependsOn", ()) if ref in refs]}
        for item in whole["dependencies"]
        if item["ref"] in refs
    ]
    edges.append({"ref": root, "dependsOn": sorted(ref for ref, name in refs.items() if name in direct)})
    return {**whole, "components": kept, "dependencies": edges}


def described() -> dict[str, Any]:
    """The document of the whole environment."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--of", "JSON"]
    command += ["--sv", _VERSION.to_version(), "--mc-type", "library", sys.executable]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    whole: dict[str, Any] = json.loads(done.stdout)
    ours = distribution(PACKAGE)
    licence = ours.metadata["License-Expression"]
    whole["metadata"]["component"] = {
        "bom-ref": PACKAGE,
        "type": "library",
        "name": PACKAGE,
        "version": ours.version,
        "licenses": [{"expression": licence, "acknowledgement": "declared"}],
        "purl": f"pkg:pypi/{PACKAGE}@{ours.version}",
    }
    return whole


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    whole, checker = described(), JsonStrictValidator(_VERSION)
    offered = distribution(PACKAGE).metadata.get_all("Provides-Extra") or []
    for extra in ["", *sorted(set(offered) - FOR_DEVELOPERS)]:
        name = f"{PACKAGE}-{extra}" if extra else PACKAGE
        try:
            names = closure(extra)
        except PackageNotFoundError as error:
            print(f"{name}: not written, {error.name} is not installed here")
            continue
        direct = {normalised(item.name) for item in required(PACKAGE, frozenset({extra} - {""}))}
        text = json.dumps(share(whole, names, direct), indent=1) + "\n"
        if (wrong := checker.validate_str(text)) is not None:
            print(f"{name}: {wrong}", file=sys.stderr)
            return 1
        (folder / f"{name}.cdx.json").write_text(text, encoding="utf-8", newline="\n")
        print(f"{name}: {len(names)} libraries")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist/sbom")))
