from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tether.data.batches import cut_batches, make_batch, pack
from tether.data.chat import Encoded
from tether.data.prepare import cut_rankings


@dataclass(frozen=True)
class Held:
    sequences: tuple[Encoded, ...]


LENGTHS = st.lists(st.integers(1, 50), max_size=60)


@given(LENGTHS, st.integers(1, 80))
def test_pack_places_every_sequence_once_within_capacity(lengths, capacity):
    rows = pack(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[i] for i in row) <= capacity or len(row) == 1
    # Any-fit packing on decreasing lengths leaves at most one row at most half full (of those whose
    # items fit at all).
    sums = [sum(lengths[i] for i in row) for row in rows]
    assert sum(2 * s <= capacity for s in sums) <= 1


def test_pack_is_good_where_the_best_is_known():
    assert len(pack([6, 5, 5, 4, 4, 3, 3], 10)) == 3


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(2, 30), st.lists(st.integers(1, 40), min_size=1, max_size=4)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 20),
    st.integers(8, 300),
    st.booleans(),
)
def test_micro_batches_stay_within_the_budget_as_the_batch_that_is_made_of_them(
    shapes,
    common,
    budget,
    shared,
):
    """Also where prompts that begin alike stand in one document, which is wider than each of
    them.
    """
    rankings, limit = [], budget if shared else 0
    for number, (prompt, answers) in enumerate(shapes, 1):
        first = (0,) * common + (number,) * prompt
        counted = [(False,) * len(first) + (True,) * length for length in answers]
        rankings.append(
            Held(
                tuple(
                    Encoded((*first, *((a + 50,) * answers[a])), told)
                    for a, told in enumerate(counted)
                ),
            ),
        )
    cuts = cut_rankings(rankings, budget, document_tokens=limit)
    assert sorted(map(id, rankings)) == sorted(id(ranking) for cut in cuts for ranking in cut)
    for cut in cuts:
        made = make_batch(
            [s for ranking in cut for s in ranking.sequences],
            0,
            document_tokens=limit,
        )
        assert len(cut) == 1 or made.ids.numel() <= budget
    sequences = [s for ranking in rankings for s in ranking.sequences]
    parts = cut_batches(sequences, budget, document_tokens=limit)
    assert sorted(i for part in parts for i in part) == list(range(len(sequences)))
    for part in parts:
        made = make_batch([sequences[i] for i in part], 0, document_tokens=limit)
        assert len(made.ids) == 1 or made.ids.numel() <= budget
