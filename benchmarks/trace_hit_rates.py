"""Prefix cache hit rates of a recorded trace by the cache's capacity: the engine's blocks and a plain LRU list.

    python benchmarks/trace_hit_rates.py TRACE.jsonl --format mooncake [--report REPORT.md]

Requests come one after the other, in the order of the trace, as the Mooncake paper counts hits: no time passes, and
none holds its blocks while another asks. The engine's blocks are those of its scheduler (`KVBlockManager`), which hash
whole blocks and always compute the last token of a prompt; the list holds every block of the trace, and the last ones
of a prompt are forgotten first.
"""

__all__ = ["engine_hits", "list_hits", "main"]

import argparse
import sys
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from perfmodel.engine import KVBlockManager, Request
from perfmodel.sim.traffic.traces import TraceRow, engine_blocks, read_trace

CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000, None)  # blocks, those of the paper's table 1; None: no bound
# What was published, of which requests, and where.
_PUBLISHED = (
    (
        "40 %",
        "this trace (12,031 requests of 12,035 tokens on average), without a bound",
        '"cache ratio", Qin et al., FAST 2025 (https://www.usenix.org/conference/fast25/presentation/qin); remembered, '
        "the paper's table was not at hand when this was written",
    ),
    (
        "30 % at 1,000 blocks, 50 % from 50,000 on",
        "another trace of the same service (23,608 requests of 7,590 tokens on average), which is not comparable",
        "Qin et al. 2024, section 4.2 and table 1 (https://arxiv.org/abs/2407.00079v3)",
    ),
)


def engine_hits(rows: Sequence[TraceRow], num_blocks: int) -> list[int]:
    """Tokens that each request finds in `num_blocks` of the engine, of the trace's own block size."""
    size = rows[0].hash_block_size
    blocks = KVBlockManager(num_blocks, size)
    result = []
    for number, row in enumerate(rows):
        contents = engine_blocks(row.num_prompt_tokens, row.block_hashes, size, size)
        request = Request(number, 0, row.num_prompt_tokens, 1, contents)
        cached = blocks.cached_prefix(request)
        if not blocks.can_allocate(request, row.num_prompt_tokens, cached):
            raise SystemExit(f"request {number} needs more than {num_blocks:,} blocks; give a larger capacity")
        result.append(len(cached) * size)
        blocks.allocate(request, row.num_prompt_tokens, cached)
        blocks.publish(request, row.num_prompt_tokens)
        blocks.free(request, row.num_prompt_tokens)
    return result


def list_hits(rows: Sequence[TraceRow], num_blocks: int) -> list[int]:
    """Blocks of the trace that each request finds in a least-recently-used list of `num_blocks`."""
    known: OrderedDict[int, None] = OrderedDict()
    result = []
    for row in rows:
        result.append(sum(1 for _ in takewhile(known.__contains__, row.block_hashes)))
        for block in reversed(row.block_hashes):
            known[block] = None
            known.move_to_end(block)
        while len(known) > num_blocks:
            known.popitem(last=False)
    return result


def main() -> int:
    """Print the table, or write the report."""
    parser = argparse.ArgumentParser(prog="trace_hit_rates", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--format", default="mooncake", choices=("mooncake", "jsonl"))
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()
    rows = list(read_trace(asked.trace, asked.format))
    if not all(row.block_hashes for row in rows):
        raise SystemExit(f"{asked.trace}: has requests without hashes of their blocks; give a trace that has them")
    tokens, num_blocks = sum(row.num_prompt_tokens for row in rows), sum(len(row.block_hashes) for row in rows)
    lines = ["| capacity (blocks) | engine: tokens | list: blocks | list: mean of requests |", "|---|---|---|---|"]
    for capacity in CAPACITIES:
        bound = capacity or num_blocks
        engine, plain = engine_hits(rows, bound), list_hits(rows, bound)
        mean = sum(hits / len(row.block_hashes) for hits, row in zip(plain, rows, strict=True)) / len(rows)
        shares = (sum(engine) / tokens, sum(plain) / num_blocks, mean)
        lines.append(
            f"| {f'{capacity:,}' if capacity else 'no bound'} | " + " | ".join(f"{s:.1%}" for s in shares) + " |"
        )
    table = "\n".join(lines)
    print(table)
    if asked.report is not None:
        command = f"python benchmarks/trace_hit_rates.py {asked.trace.name} --format {asked.format}"
        text = f"# Prefix cache hit rates of {asked.trace.stem}\n\n`{command}`: {len(rows):,} requests, blocks of "
        text += f"{rows[0].hash_block_size} tokens, one request after the other, in one cache.\n\n{table}\n\n"
        text += "## Published\n\n| published | of | where |\n|---|---|---|\n"
        text += "".join(f"| {' | '.join(row)} |\n" for row in _PUBLISHED)
        text += f"\nWithout a bound, {mean:.1%} of a request are found on average, and {shares[0]:.1%} of all tokens; "
        text += "which of the two the published ratio is, is not known.\n"
        asked.report.write_text(text, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
