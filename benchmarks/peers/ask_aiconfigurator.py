"""Asks AIConfigurator for deployments: [arguments of its `cli_estimate` ...] as JSON on stdin, and on stdout for each
[TTFT ms, TPOT ms], or the sentence with which it refuses. Runs in AIConfigurator's own environment."""

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
    for number, asked in enumerate(json.load(sys.stdin), 1):
        try:
            answer = cli_estimate(asked.pop("model_path"), asked.pop("system_name"), **asked)
            answers.append([answer.ttft, answer.tpot])
        except Exception as error:
            answers.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200])
        if number % 100 == 0:
            print(f"{number} asked", file=sys.stderr, flush=True)
    json.dump(answers, output)


if __name__ == "__main__":
    main()
