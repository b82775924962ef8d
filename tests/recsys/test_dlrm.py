"""DLRM multiplies every pair of features once, and its options are checked."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import ModelError
from paceline.recipe.load import stored_recipe
from paceline.recipe.model import ModelSection
from paceline_recsys.networks import Dlrm, build_click_model, describe_tables


def small(**options: object) -> Dlrm:
    torch.manual_seed(0)
    asked = ModelSection(name="dlrm", options={"embedding": 4, "bottom": [5], "top": [6], **options})
    found = build_click_model(asked, dense_features=3, table_rows=(10, 20))
    assert isinstance(found, Dlrm)
    return found


def drawn(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 3), torch.randint(0, 10, (samples, 2))


def test_it_computes_what_the_paper_says() -> None:
    network, dense, categories = small(), *drawn(7)
    for sample in range(7):
        rows = [network.tables[table].weight[categories[sample, table]] for table in (0, 1)]
        vectors = [network.bottom(dense[sample]), *rows]
        products = [vectors[i] @ vectors[j] for i in range(3) for j in range(i)]
        expected = network.top(torch.cat([vectors[0], torch.stack(products)]))
        torch.testing.assert_close(network(dense, categories)[sample], expected.squeeze())
    assert not any("pairs" in name for name in network.state_dict())


def test_cross_layers_against_plain_torch() -> None:
    network, dense, categories = small(cross_layers=2, cross_rank=3), *drawn(7)
    with torch.no_grad():  # biases begin at zero, where a missing one would not show
        for bias in (each[1].bias for each in network.cross.layers):
            bias.normal_()
    rows = [network.tables[table].weight[categories[:, table]] for table in (0, 1)]
    x0 = x = torch.cat([network.bottom(dense), *rows], dim=1)
    for down, up in network.cross.layers:
        x = x0 * torch.einsum("wr,rv,nv->nw", up.weight, down.weight, x) + x0 * up.bias + x
    expected, found = network.top(x).squeeze(1), network(dense, categories)
    torch.testing.assert_close(found, expected)
    parameters = list(network.parameters())
    for one, two in zip(
        torch.autograd.grad(found.sum(), parameters), torch.autograd.grad(expected.sum(), parameters), strict=True
    ):
        torch.testing.assert_close(one, two)


def test_how_cross_layers_begin() -> None:
    torch.manual_seed(0)
    down, up = Dlrm(13, (10,) * 7, cross_layers=3).cross.layers[0]
    assert down.weight.shape == (64, 8 * 16)
    for each in (down, up):
        assert each.weight.std().item() == pytest.approx((2 / (64 + 128)) ** 0.5, rel=0.05)
    assert down.bias is None
    assert not up.bias.any()


def test_arithmetic_of_cross_layers() -> None:
    network, (dense, categories) = small(cross_layers=2, cross_rank=3), drawn(7)
    with FlopCounterMode(display=False) as counter:
        network(dense, categories)
    width = 3 * 4
    products = 3 * 5 + 5 * 4 + 2 * (2 * width * 3) + width * 6 + 6
    assert counter.get_total_flops() == 2 * 7 * products


def test_how_weights_begin() -> None:
    torch.manual_seed(0)
    network = Dlrm(13, (10_000,), embedding=16)
    table, layer = network.tables[0].weight, network.bottom[0]
    assert table.abs().max() <= 0.01
    assert table.std().item() == pytest.approx(0.01 / 3**0.5, rel=0.02)
    assert layer.weight.std().item() == pytest.approx((2 / (13 + 512)) ** 0.5, rel=0.05)
    assert layer.bias.std().item() == pytest.approx((1 / 512) ** 0.5, rel=0.1)


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_of_tables(sparse: bool) -> None:
    network = small(sparse=sparse)
    network(torch.randn(2, 3), torch.tensor([[1, 1], [1, 2]])).sum().backward()
    gradient = network.tables[0].weight.grad
    assert gradient is not None
    assert gradient.is_sparse == sparse
    dense = gradient.to_dense() if sparse else gradient
    assert dense[1].abs().sum() > 0
    assert dense[2:].abs().sum() == 0


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (ModelSection(name="dlrm", options={"embeding": 8}), "Did you mean 'embedding'"),
        (ModelSection(name="drlm"), "Did you mean 'dlrm'"),
        (ModelSection(name="small_resnet"), "unknown network for click data"),
        (ModelSection(name="dlrm", pretrained=True), "no published weights"),
        (ModelSection(name="dlrm", options={"bottom": "wide"}), "dlrm needs bottom as a list of whole numbers"),
        (ModelSection(name="dlrm", options={"embedding": -1}), "do not fit"),
        (ModelSection(name="dlrm", options={"cross_rank": 8}), "cross_rank has no effect without cross layers"),
        (ModelSection(name="dlrm", options={"cross_layers": 2, "cross_rank": 0}), "cross_rank=0 is below 1"),
        (ModelSection(name="torch.nn:no_such"), "has no 'no_such'"),
    ],
)
def test_what_cannot_be_built(model: ModelSection, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build_click_model(model, dense_features=3, table_rows=(10, 20))


def test_a_network_of_ones_own(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Module):
        def __init__(self, dense_features: int, table_rows: tuple[int, ...], width: int) -> None:
            super().__init__()
            self.sizes = (dense_features, table_rows, width)

    monkeypatch.setattr(nn, "OwnClicks", Own, raising=False)
    asked = ModelSection(name="torch.nn:OwnClicks", options={"width": 3})
    assert build_click_model(asked, dense_features=3, table_rows=(10, 20)).sizes == (3, (10, 20), 3)


def test_what_tables_take() -> None:
    def told(optimizer: dict[str, object]) -> str:
        tree = {"model": {"name": "dlrm", "options": {"embedding": 8}}, "optimizer": optimizer}
        return describe_tables(stored_recipe(tree, "x"), (600, 400))

    told_of = told({"name": "adamw"})
    assert "2 tables of 1,000 rows in all x 8 numbers x 4 bytes = 31.2 KiB, with 62.5 KiB of optimizer" in told_of
    assert "with 3.9 KiB of optimizer state" in told({"name": "adamw", "tables": "rowwise_adagrad"})
    assert "with 0 B of optimizer state" in told({"name": "sgd", "momentum": 0.0})
