"""What the tests of the algorithms share."""

import pytest
from jaxtyping import config


@pytest.fixture
def as_in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the run-time checks of annotations off, so that a function's own refusal of wrong
    shapes is seen.
    """
    monkeypatch.setattr(config, "jaxtyping_disable", True)
