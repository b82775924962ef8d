"""Detectors on tensors without numbers: as many proposals, objects and bytes as a real step that finds enough."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from measured_memory import measured_peaks
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.data.pipeline import Placement
from paceline.distributed.device import describe_machine
from paceline.errors import ModelError
from paceline.host.world import World
from paceline.recipe.load import load_recipe
from paceline.recipe.schema import Recipe
from paceline.tasks.task import build_task
from paceline.trainer.fake_batch import fixed_batch, largest_micro_batch, with_placeholder_data
from paceline.trainer.fake_step import fake_step
from paceline_advisor.memory.job import peak_of
from paceline_advisor.memory.trace import EVALUATION, FIRST, STEP, trace_step, trace_steps
from paceline_vision.detection.networks import SmallPyramid, small_fasterrcnn

CPU = torch.device("cpu")
# So that a network that has learned nothing finds as much as one that has.
FINDS_ENOUGH = {"box_fg_iou_thresh": 0.02, "box_bg_iou_thresh": 0.02, "box_score_thresh": 0.0, "box_nms_thresh": 1.0}


def recipe_of(model: str, options: dict[str, Any] | None = None, **more: Any) -> Recipe:
    overrides = {"model.name": model, "evaluate.batch_size": 2, **({"model.options": options} if options else {})}
    return load_recipe("shapes-maskrcnn", overrides | more).recipe


@pytest.mark.parametrize(
    ("model", "options", "tolerance"),
    [
        pytest.param("small_maskrcnn", FINDS_ENOUGH, 0.05, marks=pytest.mark.thorough),
        ("small_fasterrcnn", FINDS_ENOUGH, 0.05),
        pytest.param("small_retinanet", {"score_thresh": 0.0, "nms_thresh": 1.0}, 0.05, marks=pytest.mark.thorough),
        pytest.param(
            "torchvision:ssdlite320_mobilenet_v3_large",
            {"score_thresh": 0.0, "nms_thresh": 1.0},
            0.05,
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_step_takes_what_a_real_one_does(model: str, options: dict[str, Any], tolerance: float) -> None:
    recipe = recipe_of(model, options)
    with fake_step(recipe, micro_batch=4, machine=describe_machine(CPU), scores=True) as step:
        expected = peak_of(trace_step(step), caching=False).parts
        with FlopCounterMode(display=False) as counted:
            step.backward(step.forward())
    assert counted.get_total_flops() == real_flops(recipe, 4)
    measured = measured_peaks(recipe, 4, CPU)
    for part in (FIRST, STEP):
        assert expected[part] == pytest.approx(measured[part], rel=tolerance), part
    assert expected[EVALUATION] == pytest.approx(measured[EVALUATION], rel=max(0.15, tolerance))


def real_flops(recipe: Recipe, samples: int) -> int:
    """Of products and convolutions in a real step."""
    task = build_task(recipe)
    task.data_facts(World())
    torch.manual_seed(0)
    network = task.build_model()
    pipeline = task.open_pipeline(Placement(device=CPU, channels_last=False))
    ids = largest_micro_batch(task, samples, recipe.batch.global_size)
    assert ids is not None
    batch = next(iter(pipeline.train_batches(fixed_batch(recipe.seed, ids), 0, 1, World())))
    with FlopCounterMode(display=False) as counted:
        task.loss(network, batch).backward()
    return counted.get_total_flops()


@pytest.mark.parametrize(
    ("name", "regions", "masks"), [("shapes-maskrcnn", 32, 8), ("maskrcnn_resnet50_fpn_coco", 512, 128)]
)
def test_heads_see_what_the_settings_say(name: str, regions: int, masks: int) -> None:
    recipe, said = with_placeholder_data(load_recipe(name).recipe)
    assert (said is not None) == name.endswith("coco")
    rows: dict[str, int] = {}
    with fake_step(recipe, micro_batch=2) as step:
        heads: Any = step.network.roi_heads
        for part in ("box_head", "mask_head"):
            getattr(heads, part).register_forward_pre_hook(
                lambda _, given, part=part: rows.__setitem__(part, len(given[0]))
            )
        step.forward()
    assert rows == {"box_head": 2 * regions, "mask_head": 2 * masks}


def test_pictures_that_stand_for_coco_are_shown_as_the_recipe_says() -> None:
    loaded = load_recipe("retinanet_resnet50_fpn_coco", {"data.detection.short_sides": [400]})
    recipe, _ = with_placeholder_data(loaded.recipe)
    with fake_step(recipe, micro_batch=2) as step:
        assert {tuple(each.shape) for each in step.batch.inputs} <= {(3, 400, 533), (3, 533, 400)}
        assert [len(each["boxes"]) for each in step.batch.targets] == [7, 7]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["retinanet_resnet50_fpn_v2", "fcos_resnet50_fpn"])
def test_losses_that_write_where_boxes_overlap(name: str) -> None:
    asked = {"model.name": f"torchvision:{name}", "model.pretrained": False, "data.detection.short_sides": [128]}
    recipe, _ = with_placeholder_data(load_recipe("retinanet_resnet50_fpn_coco", asked).recipe)
    with fake_step(recipe, micro_batch=2) as step:
        step.backward(step.forward())
        assert all(each.grad is not None for each in step.network.parameters() if each.requires_grad)


def test_other_sizes_are_worked_out_from_those_that_were_done() -> None:
    with fake_step(recipe_of("small_fasterrcnn"), micro_batch=4) as step:
        steps = trace_steps(step)
        assert steps.is_scaled
        worked_out, done = (peak_of(each, caching=False).allocated for each in (steps(7), steps.again(7)))
    assert worked_out == pytest.approx(done, rel=0.01)


class ReadsNumbers(SmallPyramid):
    """A backbone of one's own whose forward pass depends on a number."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x * 2 if x.max().item() > 1 else x)


def own_detector(num_classes: int, **options: Any) -> nn.Module:
    network = small_fasterrcnn(num_classes)
    network.backbone = ReadsNumbers(width=16, levels=3, channels=32)
    return network


def test_what_depends_on_other_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("mine")
    vars(module).update(detector=own_detector)
    monkeypatch.setitem(sys.modules, "mine", module)
    with (
        fake_step(recipe_of("mine:detector")) as step,
        pytest.raises(ModelError, match=r"mine:detector cannot be run without values.*in backbone"),
    ):
        step.forward()
