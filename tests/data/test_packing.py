from hypothesis import given
from hypothesis import strategies as st

from tether.data.packing import cut_by_tokens, pack

LENGTHS = st.lists(st.integers(1, 50), max_size=60)


@given(LENGTHS, st.integers(1, 80))
def test_pack_places_every_sequence_once_within_capacity(lengths, capacity):
    rows = pack(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[i] for i in row) <= capacity or len(row) == 1
    # Any-fit packing on decreasing lengths leaves at most one row at most half full (of those whose items fit at all).
    sums = [sum(lengths[i] for i in row) for row in rows]
    assert sum(2 * s <= capacity for s in sums) <= 1


@given(LENGTHS, st.integers(1, 300))
def test_cut_by_tokens_respects_the_padded_budget(lengths, budget):
    cuts = cut_by_tokens(lengths, budget)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(lengths)))
    for cut in cuts:
        assert cut and (len(cut) == 1 or len(cut) * max(lengths[i] for i in cut) <= budget)


def test_pack_is_good_where_the_best_is_known():
    assert len(pack([6, 5, 5, 4, 4, 3, 3], 10)) == 3
