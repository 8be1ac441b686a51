"""The export's note on rounding."""

import pytest

from tether.cli.trained import read_again


@pytest.mark.parametrize(
    ("kind", "difference", "words"),
    [
        (
            "policy",
            2e-5,
            "Loaded again, the exported model differs from the trained model by at most 2e-05 nats a token.",
        ),
        # e^0.25 = 1.284
        (
            "policy",
            0.25,
            "0.25 nats a token, a factor of 1.28 in one token's probability. This comes from rounding merged weights to 16 bits",
        ),
        (
            "reward",
            0.25,
            "0.25 units of its score. This comes from rounding merged weights to 16 bits. --dtype float32",
        ),
    ],
)
def test_rounding_is_named_as_such(kind, difference, words):
    assert words in read_again(kind, difference)
