"""What the prose names exists: dotted modules and their members, files, folders and links of this repository.

Names in docstrings, comments and pages age silently when a module moves; this reads them all.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"perfmodel": ROOT / "perfmodel", "perfmodel_executors": ROOT / "executors" / "perfmodel_executors"}
SUBJECTS = ("perfmodel", "executors", "tests", "benchmarks", "docs", "workloads", "hardware_specs", "reports")
GENERATED = ("perfmodel/_data", "hardware_specs/calibrations", "reports/measured")
DOTTED = re.compile(r"(?<![\w/.-])(perfmodel(?:_executors)?(?:\.[A-Za-z_]\w*)+)")
PATH = re.compile(rf"(?<![\w/.-])((?:{'|'.join(SUBJECTS)})/[\w/.-]*\w)")
QUOTED = re.compile(r"`([\w-]+(?:/[\w-]+)+\.(?:py|md))`")
LINK = re.compile(r"\]\(([^)\s:]+)\)")
OUTLINE = re.compile(r"\bdesign(?:\.md)?,? section \d")


def prose():
    """Each line of code and pages, with the file that it stands in; data cite other repositories' paths."""
    folders = ("perfmodel", "executors", "tests", "benchmarks", "docs")
    files = [path for folder in folders for end in ("py", "md") for path in (ROOT / folder).rglob(f"*.{end}")]
    for path in sorted({*files, *ROOT.glob("*.md")} - {Path(__file__)}):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield path, number, line


def is_there(dotted):
    """Whether a dotted name leads to a module, or to a name that its module's text has."""
    first, *rest = dotted.split(".")
    place = PACKAGES[first]
    for index, part in enumerate(rest):
        if (place / part).is_dir():
            place = place / part
            continue
        module = place / f"{part}.py"
        if module.is_file():
            members = rest[index + 1 :]
            return not members or members[0].startswith("__") or has_word(module, members[0])
        return part.startswith("__") or has_word(place / "__init__.py", part)
    return True


def has_word(path, word):
    return path.is_file() and re.search(rf"\b{word}\b", path.read_text(encoding="utf-8")) is not None


def is_file_of(path, text):
    """Whether `text` names a file from the root, from a package, or from a folder above `path`."""
    bases = (ROOT, ROOT / "docs", *PACKAGES.values(), *path.parents[: len(path.relative_to(ROOT).parts)])
    return any((base / text).exists() for base in bases)


def test_modules_that_are_named_exist():
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {dotted}"
        for path, number, line in prose()
        for dotted in DOTTED.findall(line)
        if not is_there(dotted)
    ]
    assert not wrong


def test_paths_that_are_named_exist():
    wrong = []
    for path, number, line in prose():
        named = [text for text in PATH.findall(line) if not text.startswith(GENERATED) and not is_pattern(line, text)]
        if missing := [text for text in named + QUOTED.findall(line) if not is_file_of(path, text)]:
            wrong.append(f"{path.relative_to(ROOT)}:{number}: {missing}")
    assert not wrong


def is_pattern(line, text):
    """`reports/techniques_cpu_<yyyymm>.md`, `engine@*.yaml`: a shape of names, not a name."""
    return line[line.find(text) + len(text) :].lstrip("_-/.")[:1] in {"<", "*", "{", "@"}


def anchors(page):
    """The anchors that a page's headings get: lower case, without punctuation, with hyphens."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere():
    wrong = []
    for path, number, line in prose():
        for target in LINK.findall(line) if path.suffix == ".md" else ():
            file, _, anchor = target.partition("#")
            page = path.parent / file if file else path
            if not page.exists() or (anchor and anchor not in anchors(page)):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {target}")
    assert not wrong


def test_no_outline_outside_the_repository_is_cited():
    """The code and `docs/` stand by themselves: sections of documents that are not here say nothing to a reader."""
    wrong = [f"{path.relative_to(ROOT)}:{number}" for path, number, line in prose() if OUTLINE.search(line)]
    assert not wrong


def test_missing_names_are_found():
    assert is_there("perfmodel.cost.operator_timer") or is_there("perfmodel.cost")
    assert not is_there("perfmodel.nowhere.anything")
    assert not is_there("perfmodel.engine.scheduler.NoSuchName")
    assert not is_file_of(ROOT / "docs" / "design.md", "validate/nothing.py")
