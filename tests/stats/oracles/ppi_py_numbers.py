"""Prediction-powered win rates by ppi_py's own code: `python ppi_py_numbers.py`.

Needs ppi-python 0.2.3; printed numbers stand in test_prediction_powered.py.
"""

import numpy as np

CASES = [(200, 1000), (400, 400)]


def items(few, many):
    """Judgments of people and of a machine on items of which the first few have both."""
    generator = np.random.default_rng(few + many)
    total = few + many
    people = (generator.random(total) < 0.62).astype(float)
    flipped = generator.random(total) < 0.15
    machine = np.where(flipped, 1 - people, people)
    machine[generator.random(total) < 0.1] = 1.0
    return people, machine


def main():
    from ppi_py import ppi_mean_ci, ppi_mean_pointestimate

    for few, many in CASES:
        people, machine = items(few, many)
        parts = people[:few], machine[:few], machine[few:]
        point = ppi_mean_pointestimate(*parts)
        low, high = ppi_mean_ci(*parts, alpha=0.05)
        plain = ppi_mean_pointestimate(*parts, lam=1)
        numbers = [float(np.ravel(number)[0]) for number in (point, low, high, plain)]
        print((few, many), [round(number, 8) for number in numbers])


if __name__ == "__main__":
    main()
