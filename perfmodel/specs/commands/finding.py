"""Find server and load-test commands in a script, inside docker, sudo, mpirun and `sh -c`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perfmodel.errors import SpecError
from perfmodel.specs.commands.description import CommandDescription, all_commands
from perfmodel.specs.commands.shell import ANYWHERE, PodPlacement, ShellCommand, ShellScript, Unresolved, read_shell

# Their words are no command.
_SAYS = ("echo", "printf", "cat", "grep", "pkill", "pgrep", "kill", "alias", "which", "man")
_SHELLS = ("sh", "bash", "zsh", "dash")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VERSION = re.compile(r"v?(\d+\.\d+(?:\.\d+)?(?:[.-]?(?:post|rc)\d+)?)")
_DEEP = 5  # shells inside shells
_PYTHON_FLAGS = ("-u", "-O", "-B", "-I", "-s")
_RUNS_TEXT = re.compile(r"-[a-z]*c")


@dataclass(frozen=True, slots=True)
class FoundCommand:
    """A described command found in a script. version: of the engine, from the tag of the container `image`."""

    description: CommandDescription
    words: tuple[str, ...]  # what follows its name
    around: tuple[str, ...]  # what stood before it, as it was written
    environment: Mapping[str, str]  # what is set for it
    version: str | None
    place: str  # `line 3`
    image: str | None = None
    placement: PodPlacement = ANYWHERE  # of its container, where a manifest starts it
    files: Mapping[str, str] = field(default_factory=dict)  # that its own shell has written


def find_commands(script: ShellScript, place: str = "the line", depth: int = 0) -> list[FoundCommand]:
    """Described commands of `script` in order. place: its name in errors; depth: of nested shells."""
    known = all_commands()
    return [started for command in script.commands for started in _started(command, known, place, depth)]


def _started(
    command: ShellCommand, known: tuple[CommandDescription, ...], place: str, depth: int
) -> Iterator[FoundCommand]:
    words, where = command.words, f"{place}:{command.line}"
    if words[0] in _SAYS:
        return
    inner = _inner_shell(words) if depth < _DEEP else None
    span = None if inner else _start(words, known)
    if inner is None and span is None:
        return
    before = words[: inner[0] if inner else span[0] if span else 0]
    images = {image for description in known for image in description.images}
    image = next((word for word in before if _image_name(word) in images), None)
    tag = _VERSION.match((image or "").partition("@")[0].rpartition("/")[2].partition(":")[2])
    version = None if tag is None else tag[1]
    environment = {**command.environment, **_variables(before)}
    if inner is not None:
        text = inner[1]
        if isinstance(text, Unresolved):
            raise SpecError(f"{where}: {text} {text.reason}.")
        script = read_shell(text, place, environment)
        for started in find_commands(script, where, depth + 1):
            yield replace(
                started,
                around=(*before, *started.around),
                environment={**environment, **started.environment},
                version=started.version or version,
                image=started.image or image,
                place=where,
                placement=command.placement,
                files={**script.files, **started.files},
            )
    elif span is not None:
        _, end, about = span
        yield FoundCommand(about, words[end:], before, environment, version, where, image, command.placement)


def _start(words: Sequence[str], known: tuple[CommandDescription, ...]) -> tuple[int, int, CommandDescription] | None:
    """(start of the command's name, start of its flags, description); behind the image for containers."""
    heads = tuple({start[0] for command in known for start in command.starts})
    for begin, word in enumerate(words):
        if word.rpartition("/")[2].startswith(heads):
            for description, start in ((command, start) for command in known for start in command.starts):
                if (end := _matched(words, begin, start)) is not None:
                    return begin, end, description
    for index, word in enumerate(words):
        image = _image_name(word) if ":" in word or "/" in word else word
        entered = next((command for command in known if image in command.entrypoints), None)
        if entered is not None and "--entrypoint" not in words[:index]:
            return index + 1, index + 1, entered
    return None


def _matched(words: Sequence[str], begin: int, start: Sequence[str]) -> int | None:
    """Index behind `start` at `begin`; allows paths, versions (python3.12) and .py files."""
    at = begin
    for number, expected in enumerate(start):
        while number == 1 and start[0] == "python" and at < len(words) and words[at] in _PYTHON_FLAGS:
            at += 1
        if at >= len(words) or isinstance(words[at], Unresolved):
            return None
        name = words[at].rpartition("/")[2]
        is_file = expected.endswith(".py") and name == expected
        is_program = not number and re.fullmatch(rf"{re.escape(expected)}[0-9.]*", name) and expected[-3:] != ".py"
        if words[at] != expected and not is_file and not is_program:
            return None
        at += 1
    return at


def _inner_shell(words: Sequence[str]) -> tuple[int, str] | None:
    """(words before a `sh -c TEXT`, TEXT)."""
    for index, word in enumerate(words[:-1]):
        is_shell = word.rpartition("/")[2] in _SHELLS
        for behind in range(index + 1, min(index + 4, len(words) - 1)) if is_shell else ():
            if _RUNS_TEXT.fullmatch(words[behind]):
                return index, words[behind + 1]
            if not words[behind].startswith("-"):
                break
        if word == "--entrypoint" and words[index + 1].rpartition("/")[2] in _SHELLS:
            flags = (at for at in range(index + 2, len(words) - 1) if _RUNS_TEXT.fullmatch(words[at]))
            return next(((at, words[at + 1]) for at in flags), None)
    return None


def _image_name(word: str) -> str:
    """`vllm/vllm-openai` of `docker.io/vllm/vllm-openai:v0.11.2@sha256:...`."""
    head, _, tail = word.partition("@")[0].rpartition("/")
    plain = f"{head}/{tail.partition(':')[0]}".strip("/")
    return plain.removeprefix("docker.io/").removeprefix("index.docker.io/")


def _variables(words: Sequence[str]) -> dict[str, str]:
    """Variables set by `env NAME=value`, `docker run -e NAME=value` and `--env=NAME=value`."""
    values: dict[str, str] = {}
    is_behind_env = False
    for before, word in zip(("", *words), words, strict=False):
        text = word.removeprefix("--env=")
        if is_behind_env or word != text or before in ("-e", "--env", "-x"):
            match = _VARIABLE.fullmatch(text)
            values |= {match[1]: match[2]} if match is not None else {}
        is_behind_env = is_behind_env or word.rpartition("/")[2] == "env"
    return values
