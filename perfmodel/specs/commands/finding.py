"""Which command of a script starts a server or a load test, with what around it: docker, sudo, mpirun, `sh -c`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from perfmodel.errors import SpecError
from perfmodel.specs.commands.description import CommandDescription, all_commands
from perfmodel.specs.commands.shell import ANYWHERE, PodPlacement, ShellCommand, ShellScript, Unresolved, read_shell

# Their words are no command.
_SAYS = ("echo", "printf", "cat", "grep", "pkill", "pgrep", "kill", "alias", "which", "man")
_SHELLS = ("sh", "bash", "zsh", "dash")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VERSION = re.compile(r"v?(\d+\.\d+(?:\.\d+)?(?:[.-]?(?:post|rc)\d+)?)")
_DEEP = 5  # shells inside shells


@dataclass(frozen=True, slots=True)
class FoundCommand:
    """A command that is described, in a script.

    words:       what follows its name
    around:      what stood before it, as it was written
    environment: what is set for it
    version:     of the engine, where a container's tag says so; image: the container's
    place:       `line 3`
    placement:   of its container, where a manifest starts it
    """

    description: CommandDescription
    words: tuple[str, ...]
    around: tuple[str, ...]
    environment: Mapping[str, str]
    version: str | None
    place: str
    image: str | None = None
    placement: PodPlacement = ANYWHERE


def find_commands(script: ShellScript, place: str = "the line", depth: int = 0) -> list[FoundCommand]:
    """All that are described, in their order.

    place: what errors call the script; depth: of shells that it is inside of
    """
    known = all_commands()
    return [found for command in script.commands for found in _found(command, known, place, depth)]


def _found(
    command: ShellCommand, known: tuple[CommandDescription, ...], place: str, depth: int
) -> Iterator[FoundCommand]:
    words, where = command.words, f"{place}:{command.line}"
    if words[0] in _SAYS:
        return
    inner = _inner_shell(words)
    if inner is not None and depth < _DEEP:
        before, text = inner
        if isinstance(text, Unresolved):
            raise SpecError(f"{where}: {text} {text.reason}.")
        image, version = _image_before(words[:before], known)
        environment = {**command.environment, **_variables(words[:before])}
        for each in find_commands(read_shell(text, place, environment), where, depth + 1):
            yield replace(
                each,
                around=(*words[:before], *each.around),
                environment={**environment, **each.environment},
                version=each.version or version,
                image=each.image or image,
                place=where,
                placement=command.placement,
            )
        return
    span = _start(words, known)
    if span is not None:
        begin, end, description = span
        image, version = _image_before(words[:begin], known)
        environment = {**command.environment, **_variables(words[:begin])}
        yield FoundCommand(
            description, words[end:], words[:begin], environment, version, where, image, command.placement
        )


def _start(words: Sequence[str], known: tuple[CommandDescription, ...]) -> tuple[int, int, CommandDescription] | None:
    """Where a command's name begins, where its flags do, and which it is; of a container that starts it, behind the
    image."""
    heads = tuple({start[0] for each in known for start in each.starts})
    for begin, word in enumerate(words):
        if not _last_part(word).startswith(heads):
            continue
        for description in known:
            for start in description.starts:
                end = _matched(words, begin, start)
                if end is not None:
                    return begin, end, description
    for index, word in enumerate(words):
        image = _image_name(word) if ":" in word or "/" in word else word
        of = next((each for each in known if image in each.entrypoints), None)
        if of is not None and "--entrypoint" not in words[:index]:
            return index + 1, index + 1, of
    return None


def _matched(words: Sequence[str], begin: int, start: Sequence[str]) -> int | None:
    """The index behind `start` at `begin`: a program may have a path, a version (python3.12) or be a file (.py)."""
    at = begin
    for number, wanted in enumerate(start):
        if at >= len(words) or isinstance(words[at], Unresolved):
            return None
        if number == 1 and start[0] == "python":  # python -u -m module
            while at < len(words) and words[at] in ("-u", "-O", "-B", "-I", "-s"):
                at += 1
        if at >= len(words) or not _is_program(words[at], wanted, number):
            return None
        at += 1
    return at


def _is_program(word: str, wanted: str, number: int) -> bool:
    if word == wanted:
        return True
    name = _last_part(word)
    if wanted.endswith(".py"):
        return name == wanted
    return number == 0 and (name == wanted or re.fullmatch(re.escape(wanted) + r"[0-9.]*", name) is not None)


def _last_part(word: str) -> str:
    """The file's name of a path."""
    return word.rpartition("/")[2]


def _inner_shell(words: Sequence[str]) -> tuple[int, str] | None:
    """Words before a `sh -c TEXT`, and the text."""
    for index, word in enumerate(words[:-1]):
        is_shell = _last_part(word) in _SHELLS
        for behind in range(index + 1, min(index + 4, len(words) - 1)) if is_shell else ():
            if re.fullmatch(r"-[a-z]*c", words[behind]):
                return index, words[behind + 1]
            if not words[behind].startswith("-"):
                break
        if word in ("--entrypoint",) and _last_part(words[index + 1]) in _SHELLS:
            flag = next((at for at in range(index + 2, len(words) - 1) if re.fullmatch(r"-[a-z]*c", words[at])), None)
            return None if flag is None else (flag, words[flag + 1])
    return None


def _image_name(word: str) -> str:
    """`vllm/vllm-openai` of `docker.io/vllm/vllm-openai:v0.11.2@sha256:...`."""
    name = word.partition("@")[0]
    head, _, tail = name.rpartition("/")
    plain = f"{head}/{tail.partition(':')[0]}".strip("/")
    return plain.removeprefix("docker.io/").removeprefix("index.docker.io/")


def _image_before(words: Sequence[str], known: tuple[CommandDescription, ...]) -> tuple[str | None, str | None]:
    """The container image among `words`, and the version that its tag says."""
    images = {image for description in known for image in description.images}
    image = next((word for word in words if _image_name(word) in images), None)
    if image is None:
        return None, None
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    version = _VERSION.match(tag)
    return image, None if version is None else version[1]


def _variables(words: Sequence[str]) -> dict[str, str]:
    """What `env NAME=value`, `docker run -e NAME=value` and `--env=NAME=value` set."""
    found: dict[str, str] = {}
    is_behind_env = False
    for index, word in enumerate(words):
        text = word.removeprefix("--env=")
        is_given = word != text or (index and words[index - 1] in ("-e", "--env", "-x"))
        match = _VARIABLE.fullmatch(text) if is_given or is_behind_env else None
        if match is not None:
            found[match[1]] = match[2]
        is_behind_env = is_behind_env or _last_part(word) == "env"
    return found
