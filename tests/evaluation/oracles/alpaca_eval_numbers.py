"""Length-controlled win rates by alpaca_eval's own code: `python alpaca_eval_numbers.py`.

Needs alpaca_eval 0.6.6 with scikit-learn; printed numbers stand in test_length_controlled.py. The
file that alpaca_eval fetches from a hub is written here, with made-up rows.
"""

import tempfile
from pathlib import Path

import numpy as np


def pairs(seed, lean, skill, count=400):
    """Wins, lengths of both sides, difficulty and gamed rows of a made-up model."""
    generator = np.random.default_rng(seed)
    base = generator.integers(100, 2000, count)
    own = np.maximum(base + generator.normal(lean, 500, count).round().astype(int), 5)
    difficulty = generator.normal(0, 1, count)
    odds = skill - 0.8 * np.tanh((base - own) / 600) + 0.5 * difficulty
    drawn = generator.random(count)
    wins = np.where(drawn < 1 / (1 + np.exp(-odds)), 1.0, 0.0)
    wins[generator.random(count) < 0.05] = 0.5
    soft = generator.random(count) < 0.3
    wins[soft] = np.clip(1 / (1 + np.exp(-odds[soft])), 0.02, 0.98).round(3)
    gamed = {
        "wins": (generator.random(2 * count) < np.repeat([0.3, 0.6], count)).astype(float),
        "differences": np.repeat([1.2, -1.0], count) + generator.normal(0, 0.3, 2 * count),
        "difficulty": np.tile(difficulty, 2),
    }
    return wins, own, base, difficulty, gamed


CASES = [(1, -150, 0.2), (2, 300, -0.5), (3, 0, 1.5), (4, -400, -1.0)]


def main():
    import pandas as pd
    from alpaca_eval.metrics import glm_winrate

    for seed, lean, skill in CASES:
        wins, own, base, _, gamed = pairs(seed, lean, skill)
        # the file and its reader count differently: preference is 1 … 2 in annotations alone
        table = pd.DataFrame(
            {
                "model": "gamed",
                "index": np.tile(np.arange(len(wins)), 2),
                "preference": gamed["wins"],
                "std_delta_len": gamed["differences"],
                "instruction_difficulty": gamed["difficulty"],
                "not_gamed_baseline": False,
            },
        )
        rows = pd.DataFrame(
            {
                "preference": wins + 1,
                "output_1": ["x" * n for n in base],
                "output_2": ["x" * n for n in own],
                "generator_1": "base",
                "generator_2": "model",
                "annotator": "made-up",
            },
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "df_gamed.csv"
            table.to_csv(path, index=False)
            glm_winrate.hf_hub_download = lambda path=path, **_: path
            for name in glm_winrate.GLM_INFO:
                result = glm_winrate.get_length_controlled_winrate(
                    rows.copy(),
                    glm_name=name,
                    save_weights_dir=None,
                )
                print(
                    (seed, name),
                    round(result["win_rate"], 4),
                    round(result["length_controlled_winrate"], 4),
                )


if __name__ == "__main__":
    main()
