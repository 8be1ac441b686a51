"""Time that is left of a stage."""

from tether.core.pace import Forecast


def test_the_expected_time_holds_until_steps_are_measured() -> None:
    forecast = Forecast(0.0, 130.0)
    assert forecast.left(30.0) == 100.0 and forecast.left(140.0) is None

    forecast.step(150.0, done=1, total=10, seconds=20.0)

    assert forecast.left(150.0) == 9 * 20.0 and forecast.left(155.0) == 175.0
    forecast.step(165.0, done=2, total=10)
    assert forecast.left(165.0) == 8 * 15.0  # the first step is left out of the typical one


def test_the_first_step_counts_from_the_part_before_it() -> None:
    forecast = Forecast(0.0)
    assert forecast.left(5.0) is None
    forecast.part(10.0)
    forecast.step(18.0, 1, 3)
    assert forecast.left(18.0) == 16.0
    forecast.step(40.0, 3, 3)
    assert forecast.left(40.0) is None
