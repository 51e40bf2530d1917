"""Traffic: arrivals, length distributions, shared prefixes, traces, classes of requests."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from perfmodel.files.base import CheckedSpec, Spec, UsedBy, VariantSpec
from perfmodel.files.units import NonNegativeFloat, NonNegativeInt, PerSecond, PositiveFloat, PositiveInt, Seconds
from perfmodel.models.spec import SamplingMethod
from perfmodel.specs.slo import SLO

# Ten numbers are kept of each: 8 GB. At 10,000 a second, three hours.
_MAX_REQUESTS = 100_000_000
_RATES = ("constant", "poisson", "poisson_fixed_count", "gamma")  # processes with a rate
_MAX_PROMPTS = 300_000  # distinct ones that repeat: all are drawn before the first request is sent, in six seconds


class Stage(Spec):
    """`rate` requests per second for `duration_s` seconds."""

    rate: PerSecond
    duration_s: Seconds = Field(gt=0)


class Arrivals(VariantSpec):
    """When requests arrive. `stages` run back to back with the same process; a burst is an offline job, all at once.

    order: of a burst, who is first in line: as drawn (or listed in the trace), or the longest prompt or answer. Longest
           first shortens the tail of a job, in which places stay empty; answers' lengths must be known for it
    think_time_s, think_time_stddev_s: mean and standard deviation of the pause between an answer and the user's next
           request. `vllm bench serve` takes 0.25 +- 0.07 ms (reports/measured/closed_loop_202611.md), little enough for
           users of equal requests to stay in step with each other on a real server, as they do without a pause"""

    discriminator = "process"
    used_by: ClassVar[UsedBy] = {
        "rate": _RATES,
        "stages": _RATES,
        "cv": ("gamma",),
        "concurrency": ("closed_loop",),
        "think_time_s": ("closed_loop", *_RATES),  # `whatif` says how many users a rate is
        "think_time_stddev_s": ("closed_loop",),
        "order": ("burst",),
    }
    alternatives = (("rate", "stages"),)

    process: Literal["constant", "poisson", "poisson_fixed_count", "gamma", "closed_loop", "burst", "trace"] = "poisson"
    rate: PerSecond | None = None
    cv: PositiveFloat = 1.0  # gamma: coefficient of variation of the gaps (1 = Poisson)
    concurrency: PositiveInt | None = None  # closed_loop: requests in flight
    think_time_s: Seconds = Field(default=0.0, ge=0)  # closed_loop
    think_time_stddev_s: Seconds = Field(default=0.0, ge=0)  # closed_loop
    stages: tuple[Stage, ...] = ()
    order: Literal["given", "longest_prompt_first", "longest_answer_first"] = "given"

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if self.process == "closed_loop" and self.concurrency is None:
            yield "closed_loop needs `concurrency`, the number of requests in flight"
        if self.process in _RATES and not (self.rate or self.stages):
            yield f"{self.process} needs `rate` (requests per second) or `stages`"
        if self.think_time_stddev_s and not self.think_time_s:
            yield "think_time_stddev_s spreads a pause that is 0; give think_time_s, the mean pause, too"


class Lengths(VariantSpec):
    """A distribution of token counts; drawn values are rounded and clipped to [min, max]."""

    discriminator = "distribution"
    used_by: ClassVar[UsedBy] = {
        "value": ("fixed",),
        "low": ("uniform",),
        "high": ("uniform",),
        "mean": ("lognormal", "exponential"),
        "p99": ("lognormal",),
        "std": ("lognormal",),
        "values": ("empirical",),
        "path": ("empirical",),
    }
    alternatives = (("p99", "std"), ("values", "path"))

    distribution: Literal["fixed", "uniform", "lognormal", "exponential", "empirical"]
    value: PositiveInt | None = None
    low: PositiveInt | None = None
    high: PositiveInt | None = None
    mean: PositiveFloat | None = None
    p99: PositiveFloat | None = None
    std: PositiveFloat | None = None
    values: tuple[PositiveInt, ...] | None = None
    path: str | None = None  # one count per line
    min: PositiveInt = 1
    max: PositiveInt | None = None

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        has_range = self.low is not None and self.high is not None and self.low <= self.high
        needs: dict[str, tuple[Any, str]] = {
            "fixed": (self.value, "`value`"),
            "uniform": (has_range, "`low` <= `high`"),
            "lognormal": (self.mean and (self.p99 or self.std), "`mean` and one of `p99`, `std`"),
            "exponential": (self.mean, "`mean`"),
            "empirical": (self.values or self.path is not None, "one of `values`, with at least one count, and `path`"),
        }
        is_given, what = needs[self.distribution]
        if not is_given:
            yield f"{self.distribution} needs {what}"
        # mean = exp(mu + s^2/2) and p99 = exp(mu + 2.326 s) have a common s only up to p99/mean = exp(2.326^2 / 2).
        is_lognormal = self.distribution == "lognormal"
        if is_lognormal and self.mean and self.p99 and not 1 < self.p99 / self.mean < 14.9:
            yield f"lognormal: got p99 {self.p99:g}; expected 1 to 14.9 times the mean ({self.mean:g})"
        if self.max is not None and self.max < self.min:
            yield f"got max {self.max}; expected at least min ({self.min})"

    @property
    def mean_tokens(self) -> float | None:
        """Mean tokens before clipping; None where a file has the counts."""
        if self.mean is not None:
            return self.mean
        if self.value is not None:
            return float(self.value)
        if self.low is not None and self.high is not None:
            return (self.low + self.high) / 2
        return sum(self.values) / len(self.values) if self.values else None


ONE_TOKEN = Lengths(distribution="fixed", value=1)


class Prefix(CheckedSpec):
    """Prompts that share their beginnings: `num_groups` prefixes of `shared_tokens`.

    With `num_prompts_per_group`, only that many distinct prompts exist per group and they repeat in whole."""

    num_groups: PositiveInt = 1
    shared_tokens: PositiveInt
    num_prompts_per_group: PositiveInt | None = None

    def _conflicts(self) -> Iterator[str]:
        num_prompts = self.num_groups * (self.num_prompts_per_group or 1)
        if self.num_prompts_per_group is not None and num_prompts > _MAX_PROMPTS:
            yield (
                f"got {num_prompts:,} prompts (num_groups x num_prompts_per_group); expected at most {_MAX_PROMPTS:,}; "
                f"lower one of them, or leave num_prompts_per_group out if prompts do not repeat"
            )


class ImageSize(Spec):
    """An image or a video; in short 1280x720, or with frames 1280x720x16."""

    width: PositiveInt  # pixels
    height: PositiveInt  # pixels
    num_frames: PositiveInt = 1  # above 1: a video
    share: PositiveFloat = 1.0  # of the images, beside those of other sizes

    @model_validator(mode="before")
    @classmethod
    def _in_short(cls, data: Any) -> Any:
        if not isinstance(data, str):
            return data
        parts = data.lower().split("x")
        if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts):
            raise ValueError(f"got {data!r}; expected WIDTHxHEIGHT in pixels, or WIDTHxHEIGHTxFRAMES, as in 1280x720")
        return dict(zip(("width", "height", "num_frames"), map(int, parts), strict=False))

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" + (f"x{self.num_frames}" if self.num_frames > 1 else "")


def _or_in_short(schema: dict[str, Any]) -> None:
    items = {"anyOf": [schema.pop("items"), {"type": "string"}]}
    schema["anyOf"] = [{"type": schema.pop("type"), "items": items}, {"type": "string"}]


class Images(Spec):
    """Images at the beginning of each prompt, behind a shared prefix.

    num_distinct:    different images, each as often as the others; None: no image comes twice
    encoding, bytes_per_pixel: of their files, which the host decodes: some 0.2 bytes of smooth pictures in JPEG, 0.6 of
                     noise, as load tests send it; of PNG the number of bytes changes nothing"""

    per_request: PositiveInt = 1  # beside the `input_tokens` of text
    num_distinct: PositiveInt | None = None
    encoding: Literal["jpeg", "png"] = "jpeg"
    bytes_per_pixel: PositiveFloat = 0.25
    sizes: tuple[ImageSize, ...] = Field(min_length=1, json_schema_extra=_or_in_short)  # drawn by their shares

    @field_validator("sizes", mode="before")
    @classmethod
    def _one_alone(cls, sizes: Any) -> Any:
        return sizes if isinstance(sizes, list | tuple) else [sizes]


class Pause(Spec):
    """Seconds between an answer and the next turn: always `mean_s`, or drawn with this mean."""

    mean_s: Seconds = Field(ge=0)
    distribution: Literal["fixed", "exponential"] = "exponential"


class Conversations(CheckedSpec):
    """Requests as turns of conversations: each prompt is all that was said before and, of the traffic's lengths, what
    is new. A turn comes a pause after the answer before it.

    think_time:    before a user's next turn, where a recorded conversation does not say
    tool_share:    of the turns after the first, those that bring the result of a tool which the answer called, so long
                   after it (`tool_time`) and so many tokens (`tool_tokens`; the traffic's `input_tokens` unless given)
    system_tokens: of the prompt that all conversations of a group begin with, before their first turn"""

    turns: Lengths | None = None  # of a conversation; of recorded ones the file has them
    think_time: Pause = Pause(mean_s=0.0, distribution="fixed")
    tool_share: float = Field(default=0.0, ge=0, le=1)
    tool_time: Pause | None = None
    tool_tokens: Lengths | None = None
    system_tokens: NonNegativeInt = 0
    num_groups: PositiveInt = 1

    def _conflicts(self) -> Iterator[str]:
        if self.tool_share and self.tool_time is None:
            yield "got a tool_share without tool_time; give the seconds that a tool takes"
        for name in ("tool_time", "tool_tokens"):
            if getattr(self, name) is not None and "tool_share" not in self.model_fields_set:
                yield f"got {name} without tool_share, the share of the turns that it is for; give that, 0 for none"


class Rollouts(Spec):
    """Iterations of reinforcement learning: `num_requests` new answers at once; when all have come the weights are
    updated, which empties the prefix cache, and the next iteration begins.

    iterations:      that are simulated
    weight_update_s: from an iteration's last answer to the next iteration, in which engines generate nothing
    max_answer_tokens: of an answer in one iteration (partial rollouts, Kimi k1.5: arXiv 2501.12599): it is cut there,
                     and goes on in the next, which computes its prompt and its tokens so far again"""

    iterations: PositiveInt = 1
    weight_update_s: Seconds = Field(default=0.0, ge=0)
    max_answer_tokens: PositiveInt | None = None


# Of traces: a conversation a line; `agents`: a session of kv-cache-tester's
CONVERSATION_FORMATS = ("conversations", "sharegpt", "aiperf", "guidellm", "agents")
_WITHOUT_ANSWERS = ("aiperf", "guidellm")  # may have no lengths of answers


class Trace(Spec):
    """A file of recorded requests, or conversations; `speedup` divides the gaps.

    repeat:      conversations come so many times, each time as others that share nothing with the first; by default
                 once, and agents' sessions in a closed loop as often as gives each user two
    max_pause_s: longest pause before a turn, as recorded ones last hours (kv-cache-tester: --max-delay)"""

    path: str
    format: Literal[
        "azure", "mooncake", "burstgpt", "csv", "jsonl", "conversations", "sharegpt", "aiperf", "guidellm", "agents"
    ]
    speedup: PositiveFloat = 1.0
    repeat: PositiveInt | None = None
    max_pause_s: Seconds | None = Field(default=None, ge=0)

    @property
    def has_conversations(self) -> bool:
        return self.format in CONVERSATION_FORMATS


class TrafficClass(Spec):
    """A share of the requests, by a hash of their numbers, with a priority (lower is served first) and limits.

    weight: of its service among tenants, where the gateway's scheduling_policy is vtc"""

    name: str
    share: PositiveFloat
    priority: NonNegativeInt = 0
    slo: SLO | None = None
    weight: PositiveFloat = 1.0

    @field_validator("slo")
    @classmethod
    def _limits_what_a_class_has(cls, slo: SLO | None) -> SLO | None:
        gaps = [limit.field for limit in slo.statistics if limit.latency == "itl"] if slo is not None else []
        if gaps:
            raise ValueError(
                f"got {gaps[0]} for one class; gaps between tokens are counted for all classes together: give it in "
                f"the scenario's slo, or limit each request's longest gap with max_itl_ms"
            )
        return slo


class _Popularity(CheckedSpec):
    """What requests name one of, more or less often.

    zipf:   popularity falls with a number n as n^-zipf; 0: all are as popular
    shares: popularity of each, in any unit, instead"""

    count: PositiveInt
    zipf: NonNegativeFloat = 0.0
    shares: tuple[PositiveFloat, ...] = ()
    share: float = Field(default=1.0, gt=0, le=1)

    def _conflicts(self) -> Iterator[str]:
        if self.shares and len(self.shares) != self.count:
            yield f"got {len(self.shares)} shares for count={self.count}; expected one for each"
        if self.shares and self.zipf:
            yield "got zipf beside shares, which say the popularity of each; leave one of them out"

    @property
    def chances(self) -> tuple[float, ...]:
        """How likely a request names each; they add up to `share`."""
        weights = self.shares or tuple(number**-self.zipf for number in range(1, self.count + 1))
        total = sum(weights)
        return tuple(self.share * weight / total for weight in weights)


class Adapters(_Popularity):
    """LoRA adapters that requests name; all turns of a conversation name the same one.

    count:  of different adapters
    share:  of the requests (or conversations) that name one; the others ask the model itself
    rank:   of each adapter, which is what loading it takes; None: `engine.max_lora_rank`"""

    rank: PositiveInt | None = None


class StructuredOutputs(_Popularity):
    """Shapes that answers must have, as a JSON schema says (OpenAI's response_format, vLLM's structured_outputs).

    count:     of different shapes; a server compiles the grammar of each once
    share:     of the requests that ask for one
    compile_s: to compile a grammar; None: as measured for the backend, in the mean of five schemas
    mask_s:    for the mask of a token; None: likewise"""

    compile_s: Seconds | None = Field(default=None, ge=0, le=1000)
    mask_s: Seconds | None = Field(default=None, ge=0, le=1)


class Traffic(CheckedSpec):
    """What arrives. Lengths come from the distributions, or from the trace.

    Requests that are turns of conversations (`conversations`) count each for themselves, in `num_requests` as in rates:
    conversations begin at the rate of requests over the mean number of turns."""

    name: str | None = None  # of a file in workloads/traffic
    aliases: tuple[str, ...] = ()  # of that file: chat, code
    source: str | None = None  # where its figures come from
    arrivals: Arrivals = Arrivals(process="burst")
    num_requests: PositiveInt | None = None
    duration_s: Seconds | None = Field(default=None, gt=0)
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    prefix: Prefix | None = None
    conversations: Conversations | None = None
    # What executed prompts are cut from, where the model has a tokenizer: "pydoc" (the topics of Python's help), or the
    # path of a text; None: random tokens. Nothing that is simulated depends on it
    prompts: str | None = None
    trace: Trace | None = None
    priorities: tuple[NonNegativeInt, ...] = ()  # drawn uniformly; lower is served first
    classes: tuple[TrafficClass, ...] = ()  # shares add up to 1; the summary has each
    adapters: Adapters | None = None  # LoRA adapters that requests name
    images: Images | None = None  # of each prompt
    # `n` of OpenAI's API and of vLLM's SamplingParams, `group_size` of RL. Each answer is a request of its own in
    # `num_requests`, rates and results, as it is in vLLM's scheduler; those of a prompt come at once and share its KV
    samples_per_prompt: PositiveInt = 1
    rollouts: Rollouts | None = None
    # `n` beside `use_beam_search` in vLLM's API. An answer is one request of `num_requests`, which has as many texts
    beam_width: PositiveInt = 1
    structured_outputs: StructuredOutputs | None = None  # the shape that answers must have

    @model_validator(mode="before")
    @classmethod
    def _trace_brings_its_arrivals(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("trace") is not None and "arrivals" not in data:
            if isinstance(data["trace"], dict) and data["trace"].get("format") in CONVERSATION_FORMATS[1:]:
                return data  # these formats have no times: a burst unless arrivals are given
            return {**data, "arrivals": {"process": "trace"}}
        return data

    def _conflicts(self) -> Iterator[str]:
        if self.classes and self.priorities:
            yield "got classes beside priorities; each class has its own `priority`, leave the other out"
        if self.images is not None:
            repeats = self.prefix.num_prompts_per_group if self.prefix is not None else None
            others = {"trace": self.trace, "conversations": self.conversations, "prefix.num_prompts_per_group": repeats}
            for other in (name for name, given in others.items() if given):
                yield f"got images beside {other}, whose prompts would repeat them; leave one of the two out"
        twice = [name for name, count in Counter(kind.name for kind in self.classes).items() if count > 1]
        if twice:
            yield f"got {twice[0]!r} as the name of more than one class; give each its own"
        total = sum(kind.share for kind in self.classes)
        if self.classes and abs(total - 1) > 1e-6:
            yield f"got classes whose shares add up to {total:g}; they are shares of all requests: 1"
        trace, talk = self.trace, self.conversations
        is_traced = trace is not None and trace.has_conversations
        if talk is not None and self.prefix is not None:
            yield "got conversations beside a prefix; a shared beginning is conversations.system_tokens"
        if trace is not None and self.prefix is not None and self.prefix.num_prompts_per_group is not None:
            yield "got prefix.num_prompts_per_group beside a trace, whose prompts have their own lengths; leave it out"
        if is_traced and self.prefix is not None:
            yield "got a prefix beside a trace of conversations, whose turns say what they share; leave it out"
        if talk is not None and trace is not None and not is_traced:
            allowed = ", ".join(CONVERSATION_FORMATS)
            yield f"got conversations beside a trace of {trace.format}; expected formats: {allowed}"
        if talk is not None and talk.turns is None and not is_traced:
            yield "conversations need `turns`, a distribution of how many a conversation has"
        if talk is not None and self.arrivals.order != "given":
            yield f"got order {self.arrivals.order}; turns of conversations come in their own order"
        for name in ("input_tokens", "output_tokens"):
            if trace is None or getattr(self, name) is None:
                continue
            if name == "input_tokens" or trace.format not in _WITHOUT_ANSWERS:
                yield f"got {name} beside a trace of {trace.format}, which has them; leave one out"
        yield from self._sampling_conflicts()
        yield from self._missing()

    def _sampling_conflicts(self) -> Iterator[str]:
        trace, loop, samples = self.trace, self.arrivals.concurrency, self.samples_per_prompt
        if trace is not None and not trace.has_conversations and (trace.repeat or trace.max_pause_s is not None):
            yield f"got repeat or max_pause_s for a trace of {trace.format}; leave them out, conversations have them"
        if (
            trace is not None
            and trace.speedup != 1
            and self.arrivals.process != "trace"
            and not trace.has_conversations
        ):
            yield (
                f"got trace.speedup with arrivals of process {self.arrivals.process}, which do not have the trace's "
                f"gaps; leave it out, or set arrivals.process to trace"
            )
        if trace is not None and (trace.repeat or 1) > 1 and self.arrivals.process == "trace":
            yield "got trace.repeat with arrivals at the trace's times, which do not repeat; give other arrivals"
        if samples > 1 and (trace is not None or self.conversations is not None or self.classes):
            yield "got samples_per_prompt beside a trace, conversations or classes, of which each prompt has one answer"
        if samples > 1 and loop is not None and loop % samples:
            yield f"got concurrency {loop}, which counts answers; expected a multiple of samples_per_prompt={samples}"
        others: dict[str, object] = {"rollouts": self.rollouts, "images": self.images, "classes": self.classes}
        others |= {"conversations": self.has_conversations, "adapters": self.adapters}
        others |= {"samples_per_prompt": samples > 1, "structured_outputs": self.structured_outputs}
        for other in (name for name, given in others.items() if given and self.beam_width > 1):
            yield f"got beam_width={self.beam_width} beside {other}: not modelled together; leave one of the two out"
        if self.rollouts is None:
            return
        if not self.is_offline or trace is not None or self.conversations is not None:
            yield "got rollouts, whose iterations are bursts of drawn prompts; leave out other arrivals and traces"

    def _missing(self) -> Iterator[str]:
        """A sentence per missing field, and for runs that would be too long."""
        if self.trace is None and self.input_tokens is None:
            yield f"needs input_tokens{'' if self.output_tokens else ' and output_tokens'}, or a trace"
        if self.trace is None and self.arrivals.process == "trace":
            yield "arrivals.process is 'trace' but there is no `trace: {path, format}`"
        if self.trace is None and self.num_requests is None:
            if self.duration_s is None and not self.arrivals.stages:
                yield "needs `num_requests`, `duration_s` or `arrivals.stages`, or it would never end"
            if self.arrivals.process == "closed_loop":
                yield "a closed loop needs `num_requests`: as long as it has some, the next one is sent"
            if self.is_offline:
                yield "a burst needs `num_requests`: however long it is, all come at its beginning"
        if self.expected_requests is not None and self.expected_requests > _MAX_REQUESTS:
            yield (
                f"got {self.expected_requests:,.0f} requests; expected at most {_MAX_REQUESTS:,}, whose records take "
                f"8 GB; lower num_requests, duration_s or the rate: a million give the same latencies within 1 %"
            )

    @property
    def has_conversations(self) -> bool:
        """Whether requests are conversation turns that repeat what came before."""
        return self.conversations is not None or (self.trace is not None and self.trace.has_conversations)

    @property
    def samples_per_request(self) -> int:
        """Answers that a router sees as one request; trainers send those of rollouts one by one."""
        return 1 if self.rollouts is not None else self.samples_per_prompt

    @property
    def has_sessions(self) -> bool:
        """Whether requests are recorded sessions of agents, whose hashes say what prompts share."""
        return self.trace is not None and self.trace.format == "agents"

    @property
    def expected_requests(self) -> float | None:
        """Expected requests, averaged over seeds; None for a trace."""
        counts = [] if self.num_requests is None else [float(self.num_requests)]
        if self.arrivals.process in _RATES and self.arrivals.stages:
            counts.append(sum(stage.rate * stage.duration_s for stage in self.arrivals.stages))
        elif self.arrivals.process in _RATES and self.duration_s is not None and self.arrivals.rate is not None:
            counts.append(self.arrivals.rate * self.duration_s)
        iterations = 1 if self.rollouts is None else self.rollouts.iterations
        return min(counts) * iterations if counts else None

    @property
    def is_offline(self) -> bool:
        """Whether all requests arrive at once: a job measured by its makespan."""
        return self.arrivals.process == "burst"


class ExpertRouting(VariantSpec):
    """How tokens choose their experts, in models that have some.

    trained:   unequally, as trained routers leave it on real servers: popularity spread by `dispersion`, the variance
               of an expert's chance in units of its mean squared; by default as fitted to recorded servers, and none
               under the datasheet
    uniform:   all alike, as routers are trained to be
    power_law: popularity of density x^-alpha, as domain traffic skews it
    recorded:  in proportion to `popularity`, a count for each expert

    capacity_factor: every expert multiplies this many times its even share of a step's tokens: fewer are padded, more
                     are dropped (GShard, Switch); None: each multiplies what it gets"""

    discriminator = "distribution"
    used_by: ClassVar[UsedBy] = {"dispersion": ("trained",), "alpha": ("power_law",), "popularity": ("recorded",)}

    distribution: Literal["trained", "uniform", "power_law", "recorded"] = "trained"
    dispersion: float | None = Field(default=None, ge=0, le=10)
    alpha: float | None = Field(default=None, gt=0, le=3)
    popularity: tuple[NonNegativeFloat, ...] | None = None
    capacity_factor: PositiveFloat | None = None

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        needed = {"power_law": "alpha", "recorded": "popularity"}.get(self.distribution)
        if needed is not None and not getattr(self, needed):
            yield f"{self.distribution} needs {needed}"
        if self.popularity is not None and not sum(self.popularity):
            yield "popularity has only zeros; give counts of tokens for the experts"


class Sampling(VariantSpec):
    """How tokens are drawn; `default` is what the model's generation_config makes a server do.

    The others are for runs that are executed; what sampling costs in a simulation follows from its method.

    top_k, top_p, min_p: how many tokens are drawn from, with which share of the probability, from which share of the
                 likeliest one's on; top_k without a figure is 50, top_p 0.9"""

    discriminator = "method"
    used_by: ClassVar[UsedBy] = {
        "temperature": ("default", "random", "top_k", "top_p"),
        "min_p": ("default", "random", "top_k", "top_p"),
        "top_k": ("top_k", "top_p"),
        "top_p": ("top_k", "top_p"),
    }

    method: Literal["default", SamplingMethod] = "default"
    temperature: PositiveFloat = 1.0  # logits are divided by it
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # of the random numbers; else that of the scenario
