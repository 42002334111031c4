"""Which drafter a configuration means."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.engine.config import SpeculativeConfig
from quire.engine.core.drafter import Drafter, NoDrafts, StepwiseDrafter
from quire.engine.drafting.adaptive import Adaptive, StepCosts
from quire.engine.drafting.forced import ForcedTokens
from quire.engine.drafting.lookup import PromptLookup, SharedLookup
from quire.engine.drafting.selective import SelectiveDrafter
from quire.engine.drafting.stepwise import Stepwise
from quire.engine.text.grammar import GrammarCompiler

Costs = Sequence[tuple[int, float]]
"""(tokens, seconds) of steps, ascending."""
ASSUMED_COSTS = ((1, 1.0), (2, 1.5))
"""Where nothing was measured. What a grammar forces must be computed anyway, so hardly a cost is too high for it."""


def choose_drafter(
    config: SpeculativeConfig | None,
    costs: Costs,
    model: tuple[Drafter | StepwiseDrafter, Costs] | None,
    compiler: Callable[[], GrammarCompiler],
) -> Drafter | None:
    """None where nothing is guessed. `config`: None where nobody said how, which costs nothing where no grammar is.
    `model`: what asks a model or heads that draft, where some do, and what each of their steps costs. `compiler`: of
    grammars."""
    if config is None:
        config, costs = SpeculativeConfig(method="grammar"), ASSUMED_COSTS
    if config.method == "none":
        return None
    most, step_costs = config.num_speculative_tokens, StepCosts(*zip(*costs, strict=True))
    drafter: Drafter = NoDrafts()
    if model is not None:
        source, own = model[0], StepCosts(*zip(*model[1], strict=True))
        if isinstance(source, StepwiseDrafter):
            drafter = Stepwise(source, most, step_costs, own)
        else:
            drafter = Adaptive(source, most, step_costs, own)
    elif config.method != "grammar":
        lookup = PromptLookup if config.method == "ngram" else SharedLookup
        drafter = lookup(config.prompt_lookup_min)
    forced: Drafter = ForcedTokens(drafter, compiler)
    if model is None:
        forced = SelectiveDrafter(forced, step_costs)
    return Adaptive(forced, most, step_costs)
