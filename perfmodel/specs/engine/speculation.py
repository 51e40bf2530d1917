"""`SpeculativeConfig`: tokens drafted cheaply and verified in one model step (vLLM's name).

Draft costs follow from the method (`perfmodel.cost.steps.speculation`); `Acceptance` is drawn from by the simulator and
measured by executed runs.

The acceptance catalog has published mean accepted lengths of drafts as laws over the draft length.
With n drafted tokens a step gives, the model's own token included,

    L(n) = 1 + sum over k <= n of a_1 a_2 ... a_k,     a_k = first * decay^(k - 1)

a_k is the probability that drafted token k is right, given that all before it were: a token further ahead is harder to
draft. A domain (`dataset`) multiplies the odds of `first` by a factor that all drafters share: so domains are known in
which nobody measured a drafter. `hardware_specs/calibrations/acceptance.yaml` has the laws and the factors' logarithms,
written by `perfmodel calibrate --acceptance`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from math import exp, prod
from operator import mul
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, ValidationError, field_validator, model_validator

from perfmodel.errors import SpecError
from perfmodel.files.base import CheckedSpec, Resolved, Spec, UsedBy, VariantSpec
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import CommittedFits, load_fitted
from perfmodel.files.sandbox import LARGEST_JSON_BYTES, read_limited
from perfmodel.files.units import NonNegativeInt, PositiveInt
from perfmodel.models.spec import ModelSpec

KEYS = ("model", "method", "mode", "dataset")  # by which entries are looked up: what counts most comes first
ANY = "any"
UNSTATED = "unstated"  # of rows whose source does not say: shared by no other


class AcceptanceLaw(Spec):
    """Acceptance of one drafter on one dataset.

    method, mode: as published: eagle3, mtp ...; thinking_on, thinking_off
    first, decay: of the law above
    longest:      number of drafted tokens up to which it was fitted"""

    model: str
    method: str
    dataset: str
    mode: str
    first: Annotated[float, Field(gt=0, lt=1)]
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    longest: PositiveInt

    def at_odds(self, log_odds: float) -> float:
        """`first` with its odds multiplied by exp(log_odds)."""
        return 1 / (1 + (1 / self.first - 1) * exp(-log_odds))

    def rates(self, depth: int) -> tuple[float, ...]:
        """Conditional acceptance of the first `depth` drafted tokens."""
        return tuple(self.first * self.decay**k for k in range(depth))

    def length(self, depth: int) -> float:
        """Mean tokens of a step that drafts `depth` tokens, its own included."""
        return 1.0 + sum(accumulate(self.rates(depth), mul), 0.0)


class LawMatch(NamedTuple):
    """A law for what was asked, and the entries that it is the geometric mean of. is_exact: they are what was asked"""

    law: AcceptanceLaw
    entries: tuple[AcceptanceLaw, ...]
    is_exact: bool

    @property
    def names(self) -> str:
        """What the entries are of, by `KEYS`; many values of one key are counted."""
        values = {key: [*dict.fromkeys(getattr(law, key) for law in self.entries)] for key in KEYS}
        return ", ".join("/".join(some) if len(some) < 4 else f"{len(some)} {key}s" for key, some in values.items())


class AcceptanceCatalog(CommittedFits):
    """laws: drafter, mode and dataset -> law
    domains: dataset -> logarithm of the factor on the odds of `first`

    length_error, model_error: 80th percentile of |log(measured / predicted)| of draft lengths, and of models, that were
                               left out of the fit"""

    laws: dict[str, AcceptanceLaw] = Field(min_length=1)
    domains: dict[str, float] = Field(default_factory=dict)
    length_error: float = Field(default=0.0, ge=0)
    model_error: float = Field(default=0.0, ge=0)

    def known(self, key: str) -> list[str]:
        """All values of one of `KEYS`, sorted."""
        return sorted({getattr(law, key) for law in self.laws.values()} - {UNSTATED})

    def nearest(self, wanted: Mapping[str, str]) -> LawMatch:
        """The mean of the drafters that share most with `wanted` (`any` is shared by none): by model, method and mode.
        Their other domains are moved to the one wanted, unless the model has entries of that itself."""

        def shared(law: AcceptanceLaw) -> tuple[bool, ...]:
            return tuple(getattr(law, key) == wanted.get(key) != UNSTATED for key in KEYS)

        marks = {name: shared(law) for name, law in self.laws.items()}
        most = max(marks.values())
        if not most[0]:
            most = most[:-1]
        names = [name for name, mark in marks.items() if mark[: len(most)] == most]
        laws = tuple(self.laws[name] for name in names)
        domain = self.domains.get(wanted.get("dataset", ANY))
        moves = [0.0 if domain is None else domain - self.domains.get(law.dataset, domain) for law in laws]
        counts = Counter(name.split()[0] for name in names)  # entries of each drafter: each drafter weighs the same
        weights = [1 / (len(counts) * counts[name.split()[0]]) for name in names]
        first = prod(law.at_odds(move) ** weight for law, move, weight in zip(laws, moves, weights, strict=True))
        decay = prod(law.decay**weight for law, weight in zip(laws, weights, strict=True))
        update = {"first": first, "decay": decay, "longest": max(law.longest for law in laws)}
        return LawMatch(laws[0].model_copy(update=update), laws, len(most) == len(KEYS) and all(most))


def load_catalog() -> AcceptanceCatalog:
    """The committed catalog. Raises SpecError for a file that is missing or malformed."""
    return load_fitted(AcceptanceCatalog, data_dir("calibrations") / "acceptance.yaml")


class CatalogQuery(CheckedSpec):
    """The entries of the acceptance catalog to use; `any`: the mean of all.

    model, method: unless given, the scenario's where the catalog has them, else any
    dataset, mode: unless given, any; as in dataset: coding (the domain), mode: thinking_off"""

    model: str | None = None
    method: str | None = None
    dataset: str = ANY
    mode: str = ANY

    def _conflicts(self) -> Iterator[str]:
        for key in KEYS:
            value, known = getattr(self, key), load_catalog().known(key)
            if value not in (None, ANY, *known):
                yield f"{key}: got {value!r}; the acceptance catalog has {', '.join(known)}, or take {ANY}"

    def completed(self, model: str, method: str) -> "CatalogQuery":
        """The query of a scenario with `model`, drafting by `method`."""
        catalog, own = load_catalog(), {"model": model, "method": method}
        update = {key: value if value in catalog.known(key) else ANY for key, value in own.items()}
        return self.model_copy(update={key: value for key, value in update.items() if getattr(self, key) is None})

    @property
    def match(self) -> LawMatch:
        return load_catalog().nearest(self.model_dump())

    def note(self, model: str) -> str:
        """A sentence on where the acceptance of drafts for `model` comes from, and how far it may be off."""
        match, catalog = self.match, load_catalog()
        is_own = match.is_exact and match.law.model == model
        error = catalog.length_error if is_own else max(catalog.model_error, catalog.length_error)
        nearest = f"mean of its {len(match.entries)} nearest entries" if len(match.entries) > 1 else "its nearest entry"
        lacks = "" if model == match.law.model else f"the catalog has no {model}; "
        return (
            f"Acceptance of drafts: {lacks}{'entry of the catalog' if match.is_exact else nearest} ({match.names}); 80"
            f" % of lengths left out of such fits are within {error:.0%}."
        )


RIGHT_OF_MTP = 0.85  # of the second tokens that DeepSeek-V3's MTP drafts (its report, section 5.4.3: 85 to 90 %)
RIGHT_OF_NGRAMS = 0.3  # of drafted tokens, in chat: assumed
Probability = Annotated[float, Field(ge=0, le=1)]
_MAX_NODES = 4096  # of a tree, beside the token that it grows from
_MAX_DEPTH = 128  # a step's cost is worked out for each, and for each batch
# The field that a method cannot do without.
_NEEDED = {
    "draft_model": "model",
    "self_skip": "draft_layers",
    "self_quantized": "quantization",
    "lookahead": "lookahead",
}
_MAX_TREE_DEPTH = 24  # vLLM's default of suffix_decoding_max_tree_depth, and of the tokens that suffix decoding drafts


class MeasuredAcceptance(CheckedSpec):
    """What an executed run writes and `acceptance.measured` reads: a JSON file.

    examined: for each depth, how often a token drafted there came to be judged: all before it were right
    by_rank:  for each depth, how many of `accepted` were the first, second ... candidate (trees)
    offered:  how many of the first of `examined` there were: a drafter that had none to offer counts as wrong there
    method, model: what was executed, for the reader"""

    method: str = ""
    model: str = ""
    examined: tuple[NonNegativeInt, ...] = Field(min_length=1)
    accepted: tuple[NonNegativeInt, ...] = Field(min_length=1)  # how many of those were right
    by_rank: tuple[tuple[NonNegativeInt, ...], ...] | None = None
    offered: NonNegativeInt | None = None

    def _conflicts(self) -> Iterator[str]:
        examined, accepted = self.examined, self.accepted
        if len(examined) != len(accepted):
            yield f"got {len(examined)} depths in examined and {len(accepted)} in accepted; give both"
        for depth, (count, of) in enumerate(zip(accepted, examined, strict=True), 1):
            if count > of:
                yield f"depth {depth}: got {count} accepted of {of} examined; at most all are"
        if not examined[0]:
            yield "no token is examined at depth 1; record a run that drafts tokens"
        if self.offered is not None and not accepted[0] <= self.offered <= examined[0]:
            yield (
                f"got {self.offered} offered; expected from what was accepted at depth 1 ({accepted[0]}) to what "
                f"was examined there ({examined[0]})"
            )
        if self.by_rank is not None and tuple(map(sum, self.by_rank)) != accepted:
            yield "got by_rank that does not sum to accepted at each depth; leave it out, or correct it"

    @property
    def rates(self) -> tuple[float, ...]:
        """Conditional acceptance by depth, as far as anything was examined."""
        return tuple(a / n for a, n in zip(self.accepted, self.examined, strict=True) if n)

    @classmethod
    def read(cls, path: str | Path) -> "MeasuredAcceptance":
        """Counts from a file. Raises SpecError where there are none."""
        try:
            return cls.model_validate_json(read_limited(Path(path), LARGEST_JSON_BYTES))
        except OSError as error:
            raise SpecError(f"{path}: the measured acceptance cannot be read: {error.strerror}.") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise SpecError(
                f"{path}: {place}: {first['msg'].removeprefix('Value error, ')}; `perfmodel execute` of a scenario "
                f"with speculation writes such a file."
            ) from None


class Acceptance(VariantSpec):
    """How likely a drafted token is right, given that all before it were; one of five ways to say it.

    per_rank:     by depth, then by candidate: that the r-th candidate is the right one (so they sum to at most 1); the
                  last depth repeats

    Of suffix decoding per_position says it by how many were right in a row before, in this step and those before it.

    offered: the share of steps in which the drafter has tokens to offer a sequence; in the others it is wrong, as the
             rates say, and there is nothing to verify: n-gram lookup where no n-gram came before"""

    alternatives = (("rate", "per_position", "per_rank", "measured", "catalog"),)

    rate: Probability | None = None  # the same everywhere
    per_position: tuple[Probability, ...] | None = Field(default=None, min_length=1)  # by depth; the last repeats
    per_rank: tuple[tuple[Probability, ...], ...] | None = Field(default=None, min_length=1)
    measured: str | None = None  # path of a JSON file that an executed run wrote (`MeasuredAcceptance`)
    catalog: CatalogQuery | None = None  # published for this or the nearest model: chains of method eagle, eagle3, mtp
    offered: Probability = 1.0

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        (ways,) = self.alternatives
        if all(getattr(self, name) is None for name in ways):
            yield f"got nothing; give one of {', '.join(ways)}"
        for depth, ranks in enumerate(self.per_rank or (), 1):
            if not ranks or sum(ranks) > 1 + 1e-9:
                yield (
                    f"per_rank, depth {depth}: got {len(ranks)} candidates that sum to {sum(ranks):g}; only one of "
                    f"them can be right, so give at least one and a sum of at most 1"
                )

    def rates(self, depth: int, widths: tuple[int, ...] | None = None) -> tuple[float, ...]:
        """Per position to `depth`: probability that a candidate is right given all before. Raises SpecError for an
        unreadable measured file.

        widths: candidates by depth, default one. Undistinguished candidates (`rate`, `per_position`, measured without
        ranks) share one probability."""
        widths = widths or (1,) * depth
        if self.rate is not None:
            return (self.rate,) * depth
        if self.catalog is not None:
            return self.catalog.match.law.rates(depth)
        ranks, counts = self.per_rank, None if self.measured is None else MeasuredAcceptance.read(self.measured)
        if counts is not None and counts.by_rank is not None:
            rows = zip(counts.by_rank, counts.examined, strict=False)
            ranks = tuple(tuple(accepted / examined for accepted in row) for row, examined in rows if examined)
        if ranks is not None:
            of_depth = [ranks[min(i, len(ranks) - 1)] for i in range(depth)]
            return tuple(min(sum(row[:width]), 1.0) for row, width in zip(of_depth, widths, strict=True))
        known = counts.rates if counts is not None else self.per_position or ()
        return tuple(known[min(i, len(known) - 1)] for i in range(depth))

    @property
    def share_offered(self) -> float:
        """Share of a drafting sequence's steps with a draft. Raises SpecError for an unreadable measured file."""
        if self.measured is None:
            return self.offered
        counts = MeasuredAcceptance.read(self.measured)
        return self.offered if counts.offered is None else counts.offered / counts.examined[0]


class Lookahead(Spec):
    """Lookahead decoding (Fu et al. 2024): `window` columns of Jacobi iteration, n-grams of `ngram` tokens collected
    from them, and up to `guesses` of these verified in the same step."""

    window: PositiveInt = 15
    ngram: Annotated[int, Field(ge=2)] = 5
    guesses: PositiveInt = 15


class SpeculativeConfig(VariantSpec):
    """vLLM's `speculative_config`, as far as names exist there.

    method:       who drafts: a smaller model; n-grams of the text so far; the model's own first layers (LayerSkip), or
                  with quantized weights; extra heads (Medusa); a small network over its features (EAGLE); Jacobi
                  iterations beside the step (lookahead); the longest match in trees of prompts and answers (suffix)
    num_speculative_tokens: how deep a draft goes; of a tree or of lookahead it is the shape that says so
    model:        the draft model                                          (draft_model)
    quantization: what the drafter's weights are quantized to              (self_quantized; draft_model)
    prompt_lookup_max, prompt_lookup_min: longest and shortest n-gram looked for; vLLM's default is 5    (ngram)
    suffix_decoding_max_tree_depth: most tokens of a match and its draft together, 24 unless given      (suffix)
    suffix_decoding_max_spec_factor: drafted tokens for each token that matches, 1 unless given         (suffix)
    tree:         candidates by depth: every node of a depth has so many children, all verified under a tree mask
    adaptive:     the draft length is chosen for each step: what gives most tokens per second with so many sequences
    has_own_device: pipelined: the drafter runs on as many devices of its own, and shares none of the model's"""

    discriminator = "method"
    used_by: ClassVar[UsedBy] = {
        "model": ("draft_model",),
        "quantization": ("self_quantized", "draft_model"),
        "draft_layers": ("self_skip",),
        "prompt_lookup_max": ("ngram",),
        "prompt_lookup_min": ("ngram",),
        "lookahead": ("lookahead",),
        "suffix_decoding_max_tree_depth": ("suffix",),
        "suffix_decoding_max_spec_factor": ("suffix",),
        "tree": ("draft_model", "self_skip", "self_quantized", "medusa", "eagle"),
        "pipelined": ("draft_model",),
        "has_own_device": ("draft_model",),
    }

    method: Literal["draft_model", "ngram", "self_skip", "self_quantized", "medusa", "eagle", "lookahead", "suffix"]
    num_speculative_tokens: PositiveInt | None = None
    model: Annotated[ModelSpec, Resolved("A name in workloads/models, or a path: the draft model")] | None = None
    quantization: str | None = None
    draft_layers: PositiveInt | None = None  # the first layers that draft                              (self_skip)
    prompt_lookup_max: PositiveInt | None = None
    prompt_lookup_min: PositiveInt | None = None
    tree: tuple[PositiveInt, ...] | None = Field(default=None, min_length=1)
    lookahead: Lookahead | None = None  # its window and guesses                                   (lookahead)
    adaptive: bool = False
    disable_by_batch_size: PositiveInt | None = None  # steps with more decoding sequences than this draft nothing
    pipelined: bool = False  # the next round is drafted while this one is verified     (draft_model)
    has_own_device: bool = False
    acceptance: Acceptance | None = None  # how many tokens are right: needed to simulate, measured when executed
    suffix_decoding_max_tree_depth: Annotated[int, Field(ge=2, le=_MAX_DEPTH)] | None = None
    suffix_decoding_max_spec_factor: Annotated[float, Field(ge=1, le=_MAX_DEPTH)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _suffix_drafts_up_to_its_tree(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("method") == "suffix" and data.get("num_speculative_tokens") is None:
            return {**data, "num_speculative_tokens": data.get("suffix_decoding_max_tree_depth") or _MAX_TREE_DEPTH}
        return data

    @field_validator("method", mode="before")
    @classmethod
    def _by_its_cost(cls, method: Any) -> Any:
        """vLLM's `eagle3` and multi-token predictors (`mtp`, `deepseek_mtp` ...) cost as EAGLE does."""
        return "eagle" if method == "eagle3" or str(method).endswith("mtp") else method

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        needed = _NEEDED.get(self.method)
        if needed is not None and not getattr(self, needed):
            example = ", as in w4a16" if needed == "quantization" else ""
            yield f"method={self.method} needs {needed}{example}"
        longest = self.prompt_lookup_max or 5
        if (self.prompt_lookup_min or 1) > longest:
            given_both = f"prompt_lookup_min={self.prompt_lookup_min} above prompt_lookup_max={longest}"
            yield f"got {given_both}; lower the first or raise the second"
        shape = len(self.tree) if self.tree else self.lookahead.ngram - 1 if self.lookahead else None
        given = self.num_speculative_tokens
        if shape is None and given is None:
            yield "num_speculative_tokens is missing; give the number of tokens to draft, as in 4"
        if None not in (shape, given) and shape != given:
            of = f"a tree of {shape} levels" if self.tree else f"n-grams that give {shape}"
            yield f"got num_speculative_tokens={given} beside {of}; leave one of them out"
        if (shape or given or 0) > _MAX_DEPTH:
            yield f"got drafts of {shape or given} tokens; expected at most {_MAX_DEPTH}, as more are never all right"
        if (most := self.nodes_by_depth[-1]) > _MAX_NODES:
            yield f"got {most} tokens to verify at once per sequence; expected at most {_MAX_NODES}; narrow the tree"
        if self.has_own_device and not self.pipelined:
            yield "got has_own_device without pipelined: drafts and verification take turns; add it"
        if self.pipelined and self.tree:
            yield "got pipelined with a tree, whose next round has no single place to start; use a chain"
        if self.method == "suffix":
            yield from self._suffix_conflicts()
        has_catalog = self.acceptance is not None and self.acceptance.catalog is not None
        if has_catalog and (self.method != "eagle" or self.tree):
            what = "a tree" if self.tree else f"method={self.method}"
            yield f"got acceptance.catalog with {what}; its drafts are chains by EAGLE and the like; give a rate"
        ranks = self.acceptance.per_rank if self.acceptance is not None else None
        if ranks is not None and not self.tree:
            yield "got acceptance.per_rank without a tree; give per_position, or the tree"
        for depth, width in enumerate(self.tree or (), 1):
            if ranks is not None and (count := len(ranks[min(depth, len(ranks)) - 1])) < width:
                where = f"{count} candidates at depth {depth}, where the tree has {width}"
                yield f"acceptance.per_rank has {where}; give as many"

    def _suffix_conflicts(self) -> Iterator[str]:
        if self.adaptive:
            yield "got adaptive with method=suffix, whose drafts are as long as their match; leave it out"
        if (own := self.acceptance) is not None and (own.measured is not None or own.offered < 1):
            yield "got acceptance.measured or offered with method=suffix; give per_position, by right tokens in a row"

    def is_mtp_of(self, model: ModelSpec) -> bool:
        """Whether the multi-token prediction head of `model` drafts: it serves as the EAGLE head."""
        return self.method == "eagle" and model.num_prediction_layers > 0

    def drafting_for(self, model: ModelSpec) -> "SpeculativeConfig":
        """The same with the acceptance catalog asked for `model`."""
        if self.acceptance is None or self.acceptance.catalog is None:
            return self
        query = self.acceptance.catalog.completed(model.name, "mtp" if self.is_mtp_of(model) else "eagle3")
        return self.model_copy(update={"acceptance": self.acceptance.model_copy(update={"catalog": query})})

    @property
    def depth(self) -> int:
        """Maximum drafted tokens per step."""
        if self.tree is not None:
            return len(self.tree)
        if self.lookahead is not None:
            return self.lookahead.ngram - 1
        assert self.num_speculative_tokens is not None
        return self.num_speculative_tokens

    @property
    def is_chain(self) -> bool:
        """Whether one token is drafted behind the other, and any length may be asked for."""
        return self.tree is None and self.lookahead is None and self.method != "suffix"

    @property
    def ahead(self) -> int | None:
        """Pipelined: tokens drafted during verification, the guess of the model's own token first; else None."""
        return self.depth + 1 if self.pipelined else None

    @cached_property
    def nodes_by_depth(self) -> tuple[int, ...]:
        """Tokens verified beside the newest when drafting 0, 1, 2 ... deep.

        Chains: one per depth; trees: all nodes down to it. Lookahead: always (W + G) (N - 1), the newest included."""
        if self.lookahead is not None:
            all_of_it = (self.lookahead.window + self.lookahead.guesses) * self.depth - 1
            return (0, *(all_of_it for _ in range(self.depth)))
        widths = self.tree or (1,) * self.depth
        return tuple(accumulate((prod(widths[: i + 1]) for i in range(len(widths))), initial=0))

    @cached_property
    def depth_by_match(self) -> tuple[int, ...]:
        """Suffix decoding: draft depth after 0, 1, 2 ... right tokens in a row, the last of which repeats; else empty.

        The newest token and the r right ones before it match. A match of m tokens drafts min(K, f m) of those that its
        tree of depth D has behind it, D - m; of matches up to r + 1 that with the longest draft is taken (`speculate`
        of arctic-inference 0.1.1's suffix tree)."""
        if self.method != "suffix":
            return ()
        tree, factor = self.suffix_decoding_max_tree_depth or _MAX_TREE_DEPTH, self.suffix_decoding_max_spec_factor or 1
        drafted = (min(self.depth, int(factor * match + 1e-6), tree - match) for match in range(1, tree))
        return tuple(accumulate(drafted, max))

    @cached_property
    def typical_depth(self) -> int:
        """Draft depth where a step's matches are not known: full, or the mean of suffix decoding."""
        is_known = self.method == "suffix" and self.acceptance is not None
        return max(round(self.mean_depth), 1) if is_known else self.depth

    @property
    def mean_depth(self) -> float:
        """Suffix decoding: tokens that a step drafts, in the mean."""
        return self._match_cycle[1]

    @cached_property
    def _match_cycle(self) -> tuple[float, float]:
        """(tokens, drafted tokens) per step of suffix decoding, in the mean.

        A wrong token renews a run of right ones. With S_i = a_r ... a_(r+i-1), that i more are right, a step after r
        drafts d = d(r), has 1 + S_1 + ... + S_d tokens and is followed with S_(d+1) by a step after r + d + 1. From the
        longest draft and the last given acceptance on steps are alike."""
        assert self.acceptance is not None
        depths = self.depth_by_match
        last = max(len(depths), len(self.acceptance.per_position or ())) - 1
        rates = self.acceptance.rates(last + self.depth + 1)
        reached, run, steps, tokens, drafted = 1.0, 0, 0.0, 0.0, 0.0
        while reached > 1e-12:
            depth, is_last = depths[min(run, len(depths) - 1)], run >= last
            right = tuple(accumulate(rates[min(run, last) :][: depth + 1], mul))
            if is_last and right[-1] == 1.0:
                return depth + 1.0, float(depth)
            count = reached / (1 - right[-1]) if is_last else reached
            steps, tokens, drafted = steps + count, tokens + count * (1 + sum(right[:-1])), drafted + count * depth
            reached = 0.0 if is_last else reached * right[-1]
            run += depth + 1
        return tokens / steps, drafted / steps

    def expected_tokens(self, depth: int | None = None, rates: Sequence[float] | None = None) -> float:
        """Mean tokens per step and sequence, 1 included, at `depth` (default: full).

        rates: acceptance by depth, default from `acceptance`, which must be given

        Leviathan et al. 2023 (eq. 1) for a rate a: (1 - a^(k+1)) / (1 - a); for trees 1 plus the sum over nodes of the
        products of acceptances on the path, as in Medusa (Cai et al. 2024).

        Pipelined, a step has a draft only if all of the last one was right, the guess of the model's own token
        included; else it brings one token. The probability p of a draft satisfies p = p a_1 ... a_(k+1) + (1 - p) a_1.
        """
        if self.method == "suffix" and depth != 0:
            return self._match_cycle[0]
        if rates is None:
            assert self.acceptance is not None
            rates = self.acceptance.rates(self.depth, self.tree)
        depth = self.depth if depth is None else depth
        tokens = 1 + sum(prod(rates[: i + 1]) for i in range(depth))
        if not self.pipelined or not depth:
            return tokens
        stays = prod(rates[:depth]) * rates[min(depth, len(rates) - 1)]
        has_draft = rates[0] / (1 + rates[0] - stays)
        return has_draft * tokens + 1 - has_draft
