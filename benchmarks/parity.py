"""The table of docs/parity.md: the executed decoder beside `transformers`, over many texts and ways to cut them.

    python benchmarks/parity.py            # some two minutes
    python benchmarks/parity.py --draws 50

Each draw cuts other texts of up to 200 tokens into chunks and single tokens at random, with up to four sequences in a
step. `make test` compares the same models on one draw (`tests/parity/test_against_transformers.py`).
"""

import argparse
import tempfile
from pathlib import Path
from random import Random

from perfmodel_executors.parity import REFERENCES, build, executed, largest_difference

LONGEST = 200


def drawn_steps(rng: Random, longest: int) -> list[list[tuple[int, int]]]:
    """Steps of up to four sequences, each of which goes on with a chunk, with a token, or not at all."""
    done = [0] * rng.randint(1, 4)
    steps = []
    while any(length < longest for length in done) and len(steps) < 20:
        new = [min(rng.choice([0, 1, 1, 5, 23, 64]), longest - length) for length in done]
        steps.append(list(zip(new, done, strict=True)))
        done = [length + more for length, more in zip(done, new, strict=True)]
    return [step for step in steps if any(new for new, _ in step)]


def largest_of(name: str, draws: int, seed: int = 0) -> float:
    """The largest difference of one reference over all draws."""
    reference = REFERENCES[name]
    longest = reference.max_model_len or LONGEST
    model, rng, worst = build(reference), Random(seed), 0.0
    with tempfile.TemporaryDirectory() as folder:
        decoder = executed(reference, model, Path(folder))
        for number in range(draws):
            worst = max(worst, largest_difference(decoder, model, drawn_steps(rng, longest), seed + number))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10)
    draws = parser.parse_args().draws
    print("| family | shown by | largest difference |\n|---|---|---|")
    for family in dict.fromkeys(reference.family for reference in REFERENCES.values()):
        names = [name for name, reference in REFERENCES.items() if reference.family == family]
        worst = max(largest_of(name, draws) for name in names)
        print(f"| {family} | {', '.join(f'`{name}`' for name in names)} | {worst:.1e} |", flush=True)


if __name__ == "__main__":
    main()
