from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.engine.common.config import SpeculativeConfig
from quire.engine.common.config_types import LookupMethod
from quire.engine.core.drafter import Drafter, NullDrafter, TokenwiseDrafter
from quire.engine.spec_decode.draft_length import AdaptiveLengthDrafter, StepCosts
from quire.engine.spec_decode.grammar_drafter import GrammarDrafter
from quire.engine.spec_decode.load_aware_drafter import LoadAwareDrafter
from quire.engine.spec_decode.lookup_after_model import LookupAfterModelDrafter
from quire.engine.spec_decode.ngram_drafter import LookupDrafter, NgramDrafter, SuffixDrafter
from quire.engine.spec_decode.tokenwise_drafter import AdaptiveTokenwiseDrafter
from quire.engine.text.grammar_compiler import GrammarCompiler

MeasuredCosts = Sequence[tuple[int, float]]
"""(tokens, seconds) of steps, in ascending order."""
ASSUMED_COSTS = ((1, 1.0), (2, 1.5))
"""They hardly matter, because forced tokens must be computed anyway."""


def choose_drafter(
    config: SpeculativeConfig | None,
    costs: MeasuredCosts,
    model: tuple[Drafter | TokenwiseDrafter, MeasuredCosts] | None,
    compiler: Callable[[], GrammarCompiler],
) -> Drafter | None:
    """If `config` is None, only forced tokens are drafted, which costs nothing without a grammar. `model`: a drafter
    with a draft model or heads, and pairs (number of sequences, seconds per draft token).
    """
    if config is None:
        config, costs = SpeculativeConfig(method="grammar"), ASSUMED_COSTS
    if config.method == "none":
        return None
    max_drafts, step_costs = config.num_speculative_tokens, StepCosts(*zip(*costs, strict=True))
    drafter: Drafter = NullDrafter()
    if model is not None:
        model_drafter, draft_costs = model[0], StepCosts(*zip(*model[1], strict=True))
        if isinstance(model_drafter, TokenwiseDrafter):
            drafter = AdaptiveTokenwiseDrafter(model_drafter, max_drafts, step_costs, draft_costs)
        else:
            drafter = AdaptiveLengthDrafter(model_drafter, max_drafts, step_costs, draft_costs)
        if config.lookup is not None:
            lookup = make_lookup_drafter(config.lookup, config.prompt_lookup_min)
            drafter = LookupAfterModelDrafter(drafter, lookup, config.max_draft_tokens)
    elif config.method == "ngram" or config.method == "suffix":
        drafter = make_lookup_drafter(config.method, config.prompt_lookup_min)
    grammar_drafter: Drafter = GrammarDrafter(drafter, compiler)
    if model is None:
        grammar_drafter = LoadAwareDrafter(grammar_drafter, step_costs)
    return AdaptiveLengthDrafter(grammar_drafter, config.max_draft_tokens, step_costs)


def make_lookup_drafter(method: LookupMethod, min_ngram: int) -> LookupDrafter:
    return NgramDrafter(min_ngram) if method == "ngram" else SuffixDrafter(min_ngram)
