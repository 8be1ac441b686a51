"""Time that is left of a stage."""

import pytest

from tether.core.pace import Expected, Forecast


@pytest.mark.parametrize(("step", "left"), [(5.0, 9 * 5.0 + 30.0), (20.0, 9 * 20.0 + 60.0)])
def test_slow_steps_lengthen_later_work_and_quick_ones_leave_it(step: float, left: float) -> None:
    # ten steps of 10 s, and 30 s of a judge after them
    forecast = Forecast(0.0, Expected(0.0, 100.0, 30.0))

    forecast.step(step, done=1, total=10, seconds=step)

    assert forecast.left(step) == pytest.approx(left)
