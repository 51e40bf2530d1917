"""`GrammarCompiler`: when an engine has the grammar of a request's answer.

vLLM compiles in threads as a request arrives, and keeps what it has compiled; requests that name a grammar which is
being compiled wait for the same end. Source: vllm/v1/structured_output/__init__.py (`grammar_init`), vLLM 0.30."""

from perfmodel.cost.calibrations.host_work import GrammarFit
from perfmodel.engine import Request
from perfmodel.sim.clock import to_ticks


class GrammarCompiler:
    """Grammars of one engine; num_compiled: so far, for which num_waits requests waited."""

    def __init__(self, fit: GrammarFit) -> None:
        self._first, self._again = to_ticks(fit.compile_s), to_ticks(fit.again_s)
        self._ready_at: dict[int, int] = {}
        self.num_compiled = self.num_waits = 0

    def delay(self, request: Request, now: int) -> int:
        """Ticks from `now`, when `request` arrives, until its grammar is there; 0 without one."""
        if request.grammar is None:
            return 0
        is_new = request.grammar not in self._ready_at
        ready_at = self._ready_at.setdefault(request.grammar, now + self._first)
        self.num_compiled += is_new
        self.num_waits += ready_at > now
        return max(ready_at - now, self._again)
