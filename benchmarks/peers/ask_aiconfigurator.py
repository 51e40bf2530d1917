"""Asks AIConfigurator, in its own environment.

On stdin a list of lists: for each server the ways to ask for it, arguments of `cli_estimate`. On stdout a line for
each: [TTFT ms, TPOT ms] of the first that is answered, or why the last is refused."""

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

    output, sys.stdout = sys.stdout, sys.stderr  # it prints
    for ways in json.load(sys.stdin):
        answer: Any = None
        for asked in ways:
            try:
                estimate = cli_estimate(asked.pop("model_path"), asked.pop("system_name"), **asked)
                answer = [estimate.ttft, estimate.tpot]
                break
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps(answer), file=output, flush=True)


if __name__ == "__main__":
    main()
