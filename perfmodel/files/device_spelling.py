"""How people, drivers and benchmarks spell the names of devices: one form for all of them, and a size in the name."""

import re

from perfmodel.files.catalog import normal_name

# What tools print around a name. CPUs: "11th Gen Intel(R) Core(TM) i7-1165G7 CPU @ 2.80GHz (tigerlake)", "AMD Ryzen 7
# 4700U with Radeon Graphics", "AMD Ryzen 9 5950X 16-Core Processor". GPUs: "NVIDIA GeForce RTX 3060 Laptop GPU", "GTX
# 1070 with Max-Q Design", "AMD Radeon 780M Graphics".
_AROUND = re.compile(
    r"\((?:r|tm)\)|[®™]"  # marks
    r"|\s*\([^)]*\)\s*$"  # what stands in brackets at the end
    r"|\s+@.*$|\s+w(?:ith|/)\s+radeon.*$"
    r"|^\d+th[ -]gen\s+",
    re.IGNORECASE,
)
_WORDS_BEFORE = re.compile(r"^(?:(?:cpu|gpu|nvidia|geforce|tesla|amd|radeon|intel|apple|google|arm)-)+(?=.)")
_WORDS_AFTER = re.compile(
    r"(?:-(?:gpu|igpu|cpu|apu|graphics|processor|generation|edition|design|accelerator|model-[a-z](?:-rev-[\d.-]+)?"
    r"|\d+-cores?|(?:two|dual|four|quad|six|eight)-core))+$"
)
_MAX_Q = re.compile(r"-with-(max-[qp])")
# Cores of Apple's chips, as Geekbench and LocalScore print them: "Apple M1 4P+4E+8GPU".
_CORES = re.compile(r"-\d+p\+\d+e\+(\d+gpu)$")
_SIZE = re.compile(r"^(?P<name>.+)-(?P<size>\d+)gb$")


def plain_name(name: str) -> str:
    """A device's name without its maker and the words that tools put around it, in small letters with hyphens.

    `NVIDIA GeForce RTX 3060 Laptop GPU` -> `rtx-3060-laptop`; `Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz` ->
    `core-i7-8550u`.
    """
    while True:
        shorter = _AROUND.sub("", name)
        if shorter == name or not shorter.strip():
            break
        name = shorter
    plain = re.sub(r"-+", "-", normal_name(name)).strip("-")
    plain = _CORES.sub(r"-\1", plain)
    plain = _MAX_Q.sub(r"-\1", plain).replace("-cpu-", "-").replace("-generation-", "-")
    return _WORDS_AFTER.sub("", _WORDS_BEFORE.sub("", plain))


def split_size(name: str) -> tuple[str, int] | None:
    """A name that ends in its memory, `rtx-4060-ti-16gb`, as the rest and gigabytes; None for another."""
    match = _SIZE.match(name)
    return None if match is None else (match["name"], int(match["size"]))
