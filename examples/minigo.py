"""A network learns to play Go on 9 x 9 points from games, as MLPerf's MiniGo does from its own.

OpenSpiel has the rules and the score. The games are a simple player's: it answers next to the last stone. The network
learns its next move (policy) and who wins (value). MiniGo then plays against itself and trains on those games: that is
another loop, which would start runs like this one. On the command line the class is `task=minigo:Go`.

    pip install open_spiel
    python examples/minigo.py
"""

import shlex
import sys
import tempfile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import pyspiel
except ImportError:
    print("This example needs OpenSpiel: pip install open_spiel")
    sys.exit()

import paceline
from paceline.data.batch import Batch
from paceline.data.pipeline import Pipeline, Placement, SimplePipeline
from paceline.data.slices import SampleSlice
from paceline.metrics.accumulator import Metric
from paceline.plan import DataFacts
from paceline.recipe.unused import all_but

GAMES, HELD_OUT = 160, 30
SIDE, MOVES = 9, 40  # moves of a game before both pass
PASS = SIDE * SIDE
CENTRE = np.abs(np.arange(PASS) // SIDE - 4) + np.abs(np.arange(PASS) % SIDE - 4)  # steps from the centre


def choose(state: Any, draws: np.random.Generator) -> int:
    """Return the simple player's move: the free point next to the last stone that is nearest to the centre."""
    legal = [move for move in state.legal_actions() if move != PASS]
    history = state.history()
    if history and draws.uniform() < 0.9:
        row, column = divmod(history[-1], SIDE)
        near = [move for move in legal if max(abs(move // SIDE - row), abs(move % SIDE - column)) == 1]
        legal = sorted(near, key=lambda move: (CENTRE[move], move))[:1] or legal
    return int(draws.choice(legal))


def play(number: int) -> list[tuple[Any, int, float]]:
    """Return the positions of a game, float [6, SIDE, SIDE], each with the move and who wins: 1 for who moves, -1."""
    draws, state, found = (
        np.random.default_rng(number),
        pyspiel.load_game(f"go(board_size={SIDE})").new_initial_state(),
        [],
    )
    for _ in range(MOVES):
        last = np.zeros(PASS, dtype=np.float32)
        last[state.history()[-1:]] = 1
        # Of both colours, empty, whose turn; and what the rules forget, the last move and the edge.
        planes = np.array(state.observation_tensor(), dtype=np.float32).reshape(4, PASS)
        move, player = choose(state, draws), state.current_player()
        found.append((np.vstack([planes, last, np.ones(PASS, dtype=np.float32)]), move, player))
        state.apply_action(move)
    for _ in range(2):
        state.apply_action(PASS if PASS in state.legal_actions() else state.legal_actions()[-1])
    return [(planes.reshape(6, SIDE, SIDE), move, state.returns()[player]) for planes, move, player in found]


class Player(nn.Module):
    """Convolutions over the board, and two heads."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers = [nn.Conv2d(6, width, 3, padding=1), *(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))]
        self.body = nn.Sequential(*(nn.Sequential(each, nn.BatchNorm2d(width), nn.ReLU()) for each in layers))
        self.policy = nn.Conv2d(width, 1, 1)
        self.value = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1), nn.Tanh())

    def forward(self, boards: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the moves [N, 81], and the value for who moves, in [-1, 1], [N]."""
        seen = self.body(boards)
        return self.policy(seen).flatten(1), self.value(seen).squeeze(1)


class Go(paceline.Task):
    """Positions in, moves and winners out."""

    unit, headline = "positions", "move_accuracy"
    metrics = (
        Metric(name="loss"),
        Metric(name="move_accuracy", of="right", scale=100.0, higher_is_better=True),
        Metric(name="value_error"),
    )

    def data_facts(self, world: Any) -> DataFacts:
        """All positions; those of the last games are held out."""
        positions = [each for number in range(GAMES) for each in play(number)]
        boards, moves, winners = zip(*positions, strict=True)
        self.boards, self.moves = torch.from_numpy(np.stack(boards)), torch.tensor(moves)
        self.winners, self.begin = torch.tensor(winners).float(), (GAMES - HELD_OUT) * MOVES
        unused = all_but([], "the games are generated")
        return DataFacts(train_samples=self.begin, evaluation_samples=HELD_OUT * MOVES, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Batches that `read` makes when they are asked for."""
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT * MOVES, placement=placement, name="position")

    def read(self, part: SampleSlice, training: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Positions, and their moves and winners."""
        ids = torch.tensor(part.ids) + (0 if training else self.begin)
        return self.boards[ids], (self.moves[ids], self.winners[ids])

    def build_model(self) -> nn.Module:
        """The network; torch is seeded already."""
        return Player()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Cross-entropy of the move plus squared error of the value, as in AlphaGo Zero (Silver et al. 2017)."""
        moves, winners = batch.targets
        policy, value = model(batch.inputs)
        return F.cross_entropy(policy.float(), moves) + F.mse_loss(value.float(), winners)

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """One value for each position."""
        moves, winners = batch.targets
        policy, value = (each.float() for each in model(batch.inputs))
        error = (value - winners).square()
        right = (policy.argmax(dim=1) == moves).float()
        return {"loss": F.cross_entropy(policy, moves, reduction="none") + error, "right": right, "value_error": error}


OVERRIDES = """train.duration="8 epochs" batch.global_size=64 optimizer.name=adamw optimizer.lr=0.01
    schedule.warmup="5%" evaluate.every="3 epochs" parallel.device=cpu parallel.threads=1"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asked = shlex.split(OVERRIDES)
        result = paceline.train("digits", overrides=asked, run_dir=f"{folder}/run", task=Go, quiet=True)
    accuracy = result.metrics["move_accuracy"]
    print(f"{accuracy:.1f} % of the moves are foreseen, after {result.summary.step} steps")
    assert accuracy > 60, f"expected more than 60 %, found {accuracy:.1f} %; one move in ten is random"
