"""Asks AIConfigurator, in its own environment.

On stdin a list of lists: for each deployment the ways to ask for it, arguments of `cli_estimate`. On stdout, for each,
[TTFT ms, TPOT ms] of the first that is answered, or why the last is refused."""

import json
import logging
import sys
import warnings
from typing import Any

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")


def main() -> None:
    """Ask for each."""
    from aiconfigurator.cli.api import cli_estimate

    answers: list[Any] = []
    output, sys.stdout = sys.stdout, sys.stderr  # it prints
    for number, ways in enumerate(json.load(sys.stdin), 1):
        answers.append("")
        for asked in ways:
            try:
                answer = cli_estimate(asked.pop("model_path"), asked.pop("system_name"), **asked)
                answers[-1] = [answer.ttft, answer.tpot]
                break
            except Exception as error:
                answers[-1] = f"{type(error).__name__}: {error}"[:200]
        if number % 20 == 0:
            print(f"{number} asked", file=sys.stderr, flush=True)
    json.dump(answers, output)


if __name__ == "__main__":
    main()
