"""On a quadratic bowl everything is known by a formula: surface, slopes, curvature, components and sharpness."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from paceline_advisor.formulas.catalogue import find_formula
from paceline_advisor.formulas.network import keskar_sharpness, loss_barrier
from paceline_advisor.landscape.loss_surface import LossSurface
from paceline_advisor.landscape.measures import (
    STARTS,
    along_axes,
    climb,
    filter_normalised,
    normal_vector,
    positions,
    principal_plane,
    sharpness,
    surface,
    top_eigenvalue,
)
from paceline_advisor.landscape.study import WeightInterpolation

Bowls = Callable[..., LossSurface]
AT = torch.tensor([1.0, -2.0, 0.5, 0.3, 2.0, -1.0])


def matrix(seed: int = 0) -> torch.Tensor:
    """A symmetric matrix with positive and negative eigenvalues."""
    drawn = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))
    return drawn + drawn.T


def value(matrix: torch.Tensor, x: torch.Tensor) -> float:
    return float(0.5 * x.double() @ matrix.double() @ x.double())


# ----------------------------------------------------------------------------------------------- surface
def test_a_surface_is_the_formula(bowl: Bowls) -> None:
    subject, a = bowl(matrix(), AT), matrix()
    axes = [filter_normalised(normal_vector(4, number, AT), AT, subject.shapes) for number in range(2)]
    x, y = positions(-1, 1, 5), positions(-2, 2, 3)
    job = surface(x, y, along_axes(subject, AT, axes, "train"))
    found = job.assemble([part() for part in job.parts])
    for (i, up), (j, across) in itertools.product(enumerate(y), enumerate(x)):
        expected = value(a, AT + across * axes[0] + up * axes[1])
        assert found.values["loss"][i][j] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert found.values["loss"][1][2] == pytest.approx(value(a, AT), rel=1e-6)  # the weights themselves


def test_loss_and_gradient_are_the_formula(bowl: Bowls) -> None:
    loss, gradient = bowl(matrix(), AT).loss_and_gradient(2 * AT, "train")
    assert loss == pytest.approx(value(matrix(), 2 * AT), rel=1e-6)
    torch.testing.assert_close(gradient, matrix() @ (2 * AT))


def test_a_point_that_is_no_number_is_shown_as_such(bowl: Bowls) -> None:
    subject = bowl(matrix(), AT)
    assert not math.isfinite(along_axes(subject, AT, [AT], "train")(1e30)["loss"])
    assert math.isfinite(subject.measure(AT, "train")["loss"])  # and leaves nothing behind


# -------------------------------------------------------------------------------------------- directions
def test_filters_have_the_norms_of_the_weights_filters(bowl: Bowls) -> None:
    shapes = {"conv": torch.Size([3, 2, 1, 2]), "bias": torch.Size([3]), "linear": torch.Size([2, 4])}
    weights = torch.randn(sum(shape.numel() for shape in shapes.values()), generator=torch.Generator().manual_seed(1))
    drawn = normal_vector(1, 0, weights)
    found = filter_normalised(drawn, weights, shapes)
    assert torch.allclose(found[:12].view(3, -1).norm(dim=1), weights[:12].view(3, -1).norm(dim=1))
    assert (found[12:15] == 0).all()  # biases and norms do not move
    assert torch.allclose(found[15:].view(2, -1).norm(dim=1), weights[15:].view(2, -1).norm(dim=1))
    # Norm by norm, and not one for all: the shares of the filters differ from those that were drawn.
    assert torch.allclose(filter_normalised(7 * drawn, weights, shapes), found, rtol=1e-5)


def test_directions_are_functions_of_seed_and_number() -> None:
    like = torch.zeros(10_001)
    first = normal_vector(3, 0, like)
    assert torch.equal(first, normal_vector(3, 0, like))
    assert torch.equal(first[:77], normal_vector(3, 0, like[:77]))
    assert abs(first.mean()) < 0.05
    assert first.std() == pytest.approx(1, abs=0.05)
    for other in (normal_vector(3, 1, like), normal_vector(4, 0, like)):
        assert abs(torch.dot(first, other) / len(like)) < 0.05


# --------------------------------------------------------------------------------------------- curvature
def test_the_top_eigenvalue_is_the_matrix_own(bowl: Bowls) -> None:
    subject = bowl(matrix(), AT)
    found = top_eigenvalue(subject.curvature(AT, "train"), normal_vector(0, 0, AT), tolerance=1e-5)
    every = torch.linalg.eigvalsh(matrix().double())
    assert found.converged
    assert found.residual <= 1e-5
    assert found.value == pytest.approx(float(every[-1]), rel=1e-5)
    assert found.lowest == pytest.approx(float(every[0]), rel=1e-4)


def test_an_eigenvalue_that_did_not_converge_says_so() -> None:
    diagonal = torch.linspace(0.9, 1, 500)
    found = top_eigenvalue(lambda v: diagonal * v, normal_vector(0, 0, diagonal), tolerance=1e-6, most=4)
    assert not found.converged
    assert found.products == 5
    assert found.residual > 1e-6
    assert abs(found.value - 1) <= found.residual * found.value + 0.05


def test_in_a_hilly_place_the_largest_eigenvalue_is_the_upward_one(bowl: Bowls) -> None:
    """Not the one of largest size, which power iteration would find: that is -9 here."""
    a = torch.diag(torch.tensor([-9.0, 1.0, 2.0, 0.5, 0.1, 3.0]))
    found = top_eigenvalue(bowl(a, AT).curvature(AT, "train"), normal_vector(0, 0, AT), tolerance=1e-5)
    assert found.value == pytest.approx(3, rel=1e-4)


def test_where_the_loss_is_no_number_neither_is_the_eigenvalue() -> None:
    found = top_eigenvalue(lambda v: v * math.nan, torch.ones(5))
    assert math.isnan(found.value)
    assert not found.converged


# --------------------------------------------------------------------------------------------- sharpness
@pytest.mark.parametrize("epsilon", [1e-3, 0.1])
def test_sharpness_is_the_formula(bowl: Bowls, epsilon: float) -> None:
    """Of a bowl that curves along its axes, the largest loss is in the corner of the box that is farthest out."""
    diagonal = torch.tensor([1.0, 4.0, 0.5, 2.0, 3.0, 0.1])
    subject = bowl(torch.diag(diagonal), AT)
    loss = subject.measure(AT, "train")["loss"]
    found = sharpness(loss, [climb(subject, AT, "train", epsilon, start) for start in STARTS], epsilon)
    corner = [abs(x) + find_formula("keskar_box").function(x, epsilon) for x in AT.tolist()]
    largest = sum(0.5 * a * x * x for a, x in zip(diagonal.tolist(), corner, strict=True))
    assert found.percent == pytest.approx(keskar_sharpness(largest, value(torch.diag(diagonal), AT)), rel=2e-3)
    assert all(each.iterations <= 10 for each in found.ascents)


def test_at_the_very_bottom_a_random_start_finds_what_a_slope_cannot(bowl: Bowls) -> None:
    diagonal = torch.tensor([1.0, 4.0, 0.5, 2.0, 3.0, 0.1])
    subject, bottom = bowl(torch.diag(diagonal), 0 * AT), 0 * AT
    from_weights, from_random = (climb(subject, bottom, "train", 0.5, start) for start in STARTS)
    assert from_weights.largest_loss == 0
    largest = 0.5 * 0.25 * float(diagonal.sum())  # every corner is as high
    assert from_random.largest_loss == pytest.approx(largest, rel=1e-5)


def test_a_subspace_of_all_dimensions_has_a_box_of_its_own(bowl: Bowls) -> None:
    subject = bowl(torch.eye(6), AT)
    complete = climb(subject, AT, "train", 0.01, "weights")
    part = climb(subject, AT, "train", 0.01, "weights", subspace=2)
    assert value(torch.eye(6), AT) < part.largest_loss
    assert part.largest_loss != pytest.approx(complete.largest_loss)


def test_a_cliff_is_infinitely_sharp(bowl: Bowls) -> None:
    found = climb(bowl(torch.eye(6) * 1e38, AT), AT, "train", 0.9, "weights")
    assert math.isinf(found.largest_loss)
    assert math.isinf(sharpness(1.0, [found], 0.9).percent)


# -------------------------------------------------------------------------------------------- trajectory
def test_components_are_those_of_the_way() -> None:
    """A way in a known plane of a large space, with a little beside it."""
    torch.manual_seed(0)
    axes, _ = torch.linalg.qr(torch.randn(500, 3))
    shares = torch.tensor([[9.0, 1.0, 0.0], [6.0, -2.0, 0.01], [3.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    last = torch.randn(500)
    plane = principal_plane([last + axes @ each for each in shares])
    squares = torch.linalg.svdvals(shares[:-1].double()) ** 2
    assert plane.explained == pytest.approx((squares[:2] / squares.sum()).tolist(), rel=1e-4)
    assert plane.coordinates[-1] == (0, 0)
    for (x, y), each in zip(plane.coordinates, shares, strict=True):
        back = last + x * plane.axes[0] + y * plane.axes[1]
        assert (back - (last + axes @ each)).norm() < 0.02  # all but the little
    assert torch.stack(plane.axes) @ torch.stack(plane.axes).T == pytest.approx(torch.eye(2).numpy(), abs=1e-4)


def test_three_checkpoints_lie_in_their_plane() -> None:
    torch.manual_seed(1)
    assert sum(principal_plane([torch.randn(50) for _ in range(3)]).explained) == pytest.approx(1)


def test_a_run_that_never_moved_has_no_plane() -> None:
    with pytest.raises(ValueError, match="are the same"):
        principal_plane([torch.ones(5)] * 4)


# -------------------------------------------------------------------------------------------------- line
def test_a_barrier_is_the_rise_above_the_straight_line() -> None:
    assert loss_barrier([-0.5, 0, 0.5, 1, 1.5], [9, 1, 5, 2, 9]) == pytest.approx(5 - 1.5)
    assert loss_barrier([0, 0.5, 1], [1, 1.2, 2]) == 0
    with pytest.raises(ValueError, match="must be among"):
        loss_barrier([0, 0.5], [1, 2])


def test_a_barrier_with_a_point_that_is_no_number_is_not_known() -> None:
    assert math.isnan(loss_barrier([0, 0.5, 1], [1, math.nan, 1]))
    assert loss_barrier([-0.5, 0, 0.5, 1], [math.nan, 1, 3, 1]) == 2
    assert loss_barrier([0, 0.5, 1], [1, math.inf, 1]) == math.inf
    assert WeightInterpolation(curves={}, barrier={"train": 0.5, "validation": math.nan}).in_words() == (
        "the loss rises above the line between the two by 0.5 (train); how far it rises is not known for validation: "
        "the loss is not finite somewhere on the path"
    )
