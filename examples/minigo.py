"""A network learns to play Go on a 9 x 9 board from recorded games, like MLPerf's MiniGo from games with itself.

OpenSpiel provides the rules. The games are those of a simple player, which answers next to the last stone. The network
predicts its next move (policy) and the winner (value). MiniGo then plays against itself and trains on these games: that
is an outer loop, which starts runs like this one. In a recipe or on the command line, the task is `task=minigo:Go`.

    pip install open_spiel
    python examples/minigo.py
"""

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
from paceline.tasks import Batch, DataFacts, Metric, Pipeline, Placement, SampleSlice, SimplePipeline, all_but

SIDE, MOVES = 9, 40  # points along each side of the board; moves of a game before both players pass
GAMES, HELD_OUT_GAMES = 160, 30  # all games, and those held out
TRAIN, HELD_OUT = (GAMES - HELD_OUT_GAMES) * MOVES, HELD_OUT_GAMES * MOVES  # positions
PASS = SIDE * SIDE  # moves are numbered: the points row by row, then the pass
FROM_CENTRE = np.abs(np.indices((SIDE, SIDE)) - SIDE // 2).sum(axis=0).flatten()  # steps from the centre, by move


def choose(state: Any, rng: np.random.Generator) -> int:
    """Return the simple player's move: next to the last stone, as near to the centre as possible; 10 % are random."""
    legal = [move for move in state.legal_actions() if move != PASS]
    history = state.history()
    if history and rng.uniform() < 0.9:
        row, column = divmod(history[-1], SIDE)
        adjacent = [move for move in legal if max(abs(move // SIDE - row), abs(move % SIDE - column)) == 1]
        if adjacent:
            return int(min(adjacent, key=lambda move: FROM_CENTRE[move]))
    return int(rng.choice(legal))


def play(number: int) -> list[tuple[Any, int, float]]:
    """Return a game's positions, float32 [6, SIDE, SIDE], each with the next move and 1 if its player wins, else -1."""
    rng = np.random.default_rng(number)
    state = pyspiel.load_game(f"go(board_size={SIDE})").new_initial_state()
    boards, moves = [], []
    for _ in range(MOVES):
        planes = np.zeros((6, PASS), dtype=np.float32)
        planes[:4] = np.reshape(state.observation_tensor(), (4, PASS))  # black, white, empty, whose turn it is
        planes[4, state.history()[-1:]] = 1  # the last stone
        planes[5] = 1  # convolutions pad it with 0, so they see the edge of the board
        boards.append(planes.reshape(6, SIDE, SIDE))
        moves.append(choose(state, rng))
        state.apply_action(moves[-1])
    state.apply_action(PASS)
    state.apply_action(PASS)
    return list(zip(boards, moves, np.resize(state.returns(), MOVES), strict=True))  # the players take turns


class PolicyAndValue(nn.Module):
    """Convolutions over the board, and two heads."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers = [nn.Conv2d(6, width, 3, padding=1), *(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))]
        self.body = nn.Sequential(*(nn.Sequential(each, nn.BatchNorm2d(width), nn.ReLU()) for each in layers))
        self.policy = nn.Conv2d(width, 1, 1)
        self.value = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1), nn.Tanh())

    def forward(self, boards: Tensor) -> tuple[Tensor, Tensor]:
        """Return a logit for each point, [N, 81], and the predicted outcome for the next player, from -1 to 1, [N]."""
        features = self.body(boards)
        return self.policy(features).flatten(1), self.value(features).squeeze(1)


class Go(paceline.Task):
    """Predict the next move and the winner from a position."""

    unit, headline = "positions", "move_accuracy"
    metrics = (
        Metric(name="loss"),
        *(Metric(name=each, scale=100.0, higher_is_better=True) for each in ("move_accuracy", "frequent_accuracy")),
        Metric(name="value_error"),
    )

    def data_facts(self, world: Any) -> DataFacts:
        """Play all games; the positions of the last ones are held out."""
        boards, moves, winners = zip(*(position for game in range(GAMES) for position in play(game)), strict=True)
        self.boards, self.moves = torch.from_numpy(np.stack(boards)), torch.tensor(moves)
        self.winners = torch.tensor(winners).float()
        self.frequent_move = int(self.moves[:TRAIN].bincount().argmax())
        unused = all_but([], "the games are generated")
        return DataFacts(train_samples=TRAIN, evaluation_samples=HELD_OUT, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Return batches created by `read`."""
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT, placement=placement, name="position")

    def read(self, part: SampleSlice, training: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return positions, with their moves and winners."""
        ids = torch.tensor(part.ids) + (0 if training else TRAIN)
        return self.boards[ids], (self.moves[ids], self.winners[ids])

    def build_model(self) -> nn.Module:
        """Return the network; torch is already seeded."""
        return PolicyAndValue()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the cross-entropy of the moves plus the squared error of the values (Silver et al. 2017)."""
        moves, winners = batch.targets
        policy, value = model(batch.inputs)
        return F.cross_entropy(policy.float(), moves) + F.mse_loss(value.float(), winners)

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the metrics of each position; `frequent_accuracy` is that of always playing the most frequent move."""
        moves, winners = batch.targets
        policy, value = (each.float() for each in model(batch.inputs))
        value_error = (value - winners).square()
        loss = F.cross_entropy(policy, moves, reduction="none") + value_error
        accuracy, frequent = policy.argmax(dim=1) == moves, moves == self.frequent_move
        return {"loss": loss, "move_accuracy": accuracy, "frequent_accuracy": frequent, "value_error": value_error}


# Changes to the smallest shipped recipe, `digits`, whose network and data this task replaces.
OVERRIDES = {
    "train.duration": "8 epochs",
    "batch.global_size": 64,
    "optimizer.name": "adamw",
    "optimizer.lr": 0.01,
    "parallel.device": "cpu",
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = paceline.train("digits", overrides=OVERRIDES, run_dir=f"{folder}/run", task=Go, quiet=True)
    accuracy, baseline = result.metrics["move_accuracy"], result.metrics["frequent_accuracy"]
    print(f"{accuracy:.1f} % of the moves are predicted; the most frequent move is {baseline:.1f} % of them")
    assert accuracy > 60, f"expected more than 60 %, found {accuracy:.1f} %; one move in ten is random"
    assert accuracy > 5 * baseline, f"expected five times {baseline:.1f} %, found {accuracy:.1f} %"
