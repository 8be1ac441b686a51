"""Bradley-Terry scores by evalica's own code: `python evalica_numbers.py`.

Needs evalica 0.4.2; printed numbers stand in test_ranking.py.
"""

import numpy as np

NAMES = ("ant", "bee", "cat", "dog", "eel")


def contests(seed, count):
    """Who met whom, and 1, ½ or 0 for the first."""
    generator = np.random.default_rng(seed)
    strengths = np.array([0.0, 0.5, -0.7, 1.2, 0.1])
    pairs = np.stack([generator.permutation(5)[:2] for _ in range(count)])
    odds = strengths[pairs[:, 0]] - strengths[pairs[:, 1]]
    wins = (generator.random(count) < 1 / (1 + np.exp(-odds))).astype(float)
    wins[generator.random(count) < 0.15] = 0.5
    first, second = ([NAMES[place] for place in side] for side in pairs.T.tolist())
    return first, second, wins.tolist()


def main():
    from evalica import Winner, bradley_terry

    words = {1.0: Winner.X, 0.5: Winner.Draw, 0.0: Winner.Y}
    for seed, count in ((1, 60), (2, 500)):
        first, second, wins = contests(seed, count)
        winners = [words[win] for win in wins]
        scores = bradley_terry(first, second, winners, tolerance=1e-12, limit=100_000).scores
        strengths = np.log(scores)
        strengths -= strengths.mean()
        print((seed, count), {name: round(float(strengths[name]), 6) for name in NAMES})


if __name__ == "__main__":
    main()
