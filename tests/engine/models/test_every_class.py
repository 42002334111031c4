"""Every causal language model class of transformers has the outcome in class_support.toml, and the tables are those of
the installed transformers.
"""

import pytest
import transformers

from quire.engine.checkpoint.transformers_classes import rejection_reasons_by_model_type, transformers_version_tested
from tests.every_class import TABLE, as_table, outcome, recorded
from tests.tiny_classes import KINDS

pinned = pytest.mark.skipif(
    transformers.__version__ != transformers_version_tested(), reason="the table is of another transformers"
)


@pinned
@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_class_outcome_equals_support_table(kind: str) -> None:
    actual, expected = outcome(kind), recorded()[kind]
    assert (actual.by, actual.apart) == (expected.by, expected.apart)
    # Whether a small model of the class can be made may depend on other installed packages.
    assert actual.reason == expected.reason or "no small model" in expected.reason


@pinned
def test_class_support_tables_hold_every_class() -> None:
    outcomes = [recorded()[kind] for kind in KINDS]
    assert TABLE.read_text(encoding="utf-8") == as_table(outcomes)
    assert sum(bool(each.by) for each in outcomes) >= 120
    assert sum(each.by == "quire" for each in outcomes) >= 40
    assert {kind for kind, reason in rejection_reasons_by_model_type().items() if not reason} == {
        each.kind for each in outcomes if each.by == "transformers"
    }
