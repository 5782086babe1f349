"""Random schedules of calls, each against plain PyTorch; -k seed17] plays that one again."""

from case import in_cells
from player import Player, schedule


@in_cells([schedule(seed) for seed in range(100)])
def test_schedules(trial):
    Player(trial).play()
