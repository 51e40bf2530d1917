"""Hit rates of a tier on Mooncake's conversation trace, by capacity, vs what its authors publish of it.

Qin et al., FAST'25, appendix: "cache ratio" 40 % for the 12,031 conversations, which is met by the mean over requests
of their shares of known blocks, 38.4 %; of all blocks together it is 36.6 %, a miss by 3.4 points. The table of hit
rates by capacity in arXiv 2407.00079 (LRU: 30, 40, 48, 50, 51 % at 1,000, 10,000, 30,000, 50,000, 100,000 blocks) is of
another trace of 23,608 requests."""

import json
from pathlib import Path

import pytest

from perfmodel.engine import HostBlocks, Request

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation_trace.jsonl"
BLOCK = 512


@pytest.mark.skipif(not TRACE.exists(), reason="the trace is not beside this checkout")
def test_hit_rates_of_conversations_by_capacity() -> None:
    rows = [json.loads(line) for line in TRACE.read_text(encoding="utf-8").splitlines()]
    rates = []
    for capacity in (1_000, 10_000, 30_000, 100_000, 10**9):
        host, shares, num_found, num_blocks = HostBlocks(capacity), [], 0, 0
        for number, row in enumerate(rows):
            contents = tuple(row["hash_ids"])
            request = Request(number, number, len(contents) * BLOCK + 1, 1, contents)
            found = host.num_ready(request, 0, BLOCK) // BLOCK
            shares.append(found / len(contents))
            num_found, num_blocks = num_found + found, num_blocks + len(contents)
            for content in contents:
                host.keep(content, 0)
        rates.append(num_found / num_blocks)
    assert rates == pytest.approx([0.044, 0.211, 0.326, 0.364, 0.366], abs=6e-4)  # of a dictionary in order of use
    assert sum(shares) / len(shares) == pytest.approx(0.40, abs=0.02)
