"""Tables of the terminal."""

from io import StringIO

from rich.console import Console

from tether.cli.terminal.console import show_table


def test_the_end_of_a_long_path_is_shown_in_a_narrow_terminal() -> None:
    folder = "sweep/ppo.kl.coefficient=0.05,seed="
    console = Console(file=StringIO(), width=40)

    rows = [("ppo", f"{folder}{seed}/ppo") for seed in (1, 2)]
    show_table(rows, ("job", "folder"), "2 jobs", console=console)

    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    cells = "".join(line.split("│")[2].strip() for line in lines if line.count("│") == 3)
    assert all(path in cells for _, path in rows)
    assert "…" not in cells
