"""Which update rule and which rates does train.py of timm come to? A recipe's `optimizer` and `schedule` sections."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paceline.recipe.imports.draft import Draft
from paceline.recipe.imports.timm_data import epochs


@dataclass(frozen=True)
class Rule:
    """One of timm's optimizers, as ours.

    Attributes:
        name: Of ours.
        keys: What goes with it.
        eps: What timm adds to the denominator.
        betas: Decays of the moments.
    """

    name: str
    keys: tuple[tuple[str, Any], ...] = ()
    eps: float | None = None
    betas: tuple[float, float] | None = None


_NESTEROV, _PLAIN = (("nesterov", True),), (("nesterov", False),)
_SGD, _ADAMW = Rule("sgd", _NESTEROV), Rule("adamw", eps=1e-8, betas=(0.9, 0.999))
_LAMB = Rule("lamb", eps=1e-6, betas=(0.9, 0.999))
_RULES = {
    "sgd": _SGD,
    "nesterov": _SGD,
    "fusedsgd": _SGD,
    "momentum": Rule("sgd", _PLAIN),
    "fusedmomentum": Rule("sgd", _PLAIN),
    "adamw": _ADAMW,
    "fusedadamw": _ADAMW,
    "rmsprop": Rule("rmsprop", (("alpha", 0.9), ("eps_inside_sqrt", False)), eps=1e-8),
    "rmsproptf": Rule("rmsprop", (("alpha", 0.9), ("eps_inside_sqrt", True)), eps=1e-10),
    "lamb": _LAMB,
    "fusedlamb": _LAMB,
    "lars": Rule("lars", (*_PLAIN, ("trust_coefficient", 0.001))),
    "nlars": Rule("lars", (*_NESTEROV, ("trust_coefficient", 0.001))),
    "lion": Rule("lion", betas=(0.9, 0.99)),
    "muon": Rule("muon", _PLAIN, betas=(0.9, 0.95)),
    "nmuon": Rule("muon", _NESTEROV, betas=(0.9, 0.95)),
}
_WITH_MOMENTUM = ("sgd", "rmsprop", "lars", "muon")
_OF_OURS = {
    "alpha": "alpha",
    "nesterov": "nesterov",
    "trust_coeff": "trust_coefficient",
    "eps": "eps",
    "betas": "betas",
}
_OWN_CLIP = 1.0  # timm's LAMB clips the whole gradient to this norm by itself
_LONGEST = 20  # cycles, and factor on the length of each
_MILESTONES = 1000  # falls that a schedule may have


def put_optimizer(draft: Draft, batch: int) -> None:
    """The optimizer's section.

    Args:
        draft: The recipe.
        batch: Samples per step.
    """
    asked = str(draft["opt"]).lower().replace("_", "")
    rule = _RULES.get(asked)
    if asked == "adam" and draft["weight_decay"] == 0:
        rule = _ADAMW  # without decay they are the same
    if rule is None:
        draft.refuse("opt", f"it is none of {', '.join(_RULES)}")
        rule = _SGD
    draft.put("optimizer.name", rule.name, "opt")
    _put_rate(draft, batch)
    draft.put("optimizer.weight_decay", draft["weight_decay"], "weight_decay")
    draft.switch("optimizer.decay_norm_and_bias", on=False, note="as train.py leaves out biases and norms")
    for name, value in rule.keys:
        draft.put(f"optimizer.{name}", value, "opt")
    if rule.name in _WITH_MOMENTUM:
        draft.put("optimizer.momentum", draft["momentum"], "momentum")
    draft.idle("momentum", f"{rule.name} has none")
    _put_moments(draft, rule)
    if draft["layer_decay"] is not None:
        draft.put("optimizer.layer_decay", draft["layer_decay"], "layer_decay")
    own = _put_further(draft)
    _put_clipping(draft, rule, own)


def _put_rate(draft: Draft, batch: int) -> None:
    rate, sources = rate_of(draft, batch)
    draft.put("optimizer.lr", rate, *sources, note="" if sources == ("lr",) else f"for {batch} samples a step")
    for key in ("lr_base", "lr_base_size", "lr_base_scale"):
        draft.idle(key, "--lr says it")


def rate_of(draft: Draft, batch: int) -> tuple[float, tuple[str, ...]]:
    """The peak rate as train.py works it out, and the options it comes from."""
    if draft["lr"]:
        return draft["lr"], ("lr",)
    ratio = batch / draft["lr_base_size"]
    by_root = any(part in str(draft["opt"]).lower() for part in ("ada", "lamb"))
    if draft["lr_base_scale"] == "sqrt" or (not draft["lr_base_scale"] and by_root):
        ratio **= 0.5
    return float(f"{draft['lr_base'] * ratio:.12g}"), ("lr_base", "lr_base_size", "lr_base_scale")


def _put_moments(draft: Draft, rule: Rule) -> None:
    if rule.eps is not None:
        eps = rule.eps if draft["opt_eps"] is None else draft["opt_eps"]
        draft.put("optimizer.eps", eps, "opt_eps", note=f"of timm's {draft['opt']}" * (draft["opt_eps"] is None))
    elif draft.is_given("opt_eps"):
        draft.refuse("opt_eps", f"{rule.name} has no eps of its own here")
    if rule.betas is not None:
        betas = list(draft["opt_betas"] or rule.betas)
        if len(betas) != 2:
            draft.refuse("opt_betas", "there are two")
        note = "" if draft["opt_betas"] else f"of timm's {draft['opt']}"
        draft.put("optimizer.betas", betas, "opt_betas", note=note)
    elif draft.is_given("opt_betas"):
        draft.refuse("opt_betas", f"{rule.name} has no betas")


def _put_further(draft: Draft) -> float | None:
    """What goes to the optimizer's class as it is; returns the norm that LAMB clips to by itself."""
    own: float | None = _OWN_CLIP
    further: dict[str, Any] = {}
    for name, value in (draft["opt_kwargs"] or {}).items():
        if name == "max_grad_norm":
            own = value
        elif name in _OF_OURS:
            draft.put(f"optimizer.{_OF_OURS[name]}", value, "opt_kwargs")
        else:
            further[name] = value
    if further:
        draft.put("optimizer.options", further, "opt_kwargs")
    return own


def _put_clipping(draft: Draft, rule: Rule, own: float | None) -> None:
    keys = {"norm": "clip_norm", "value": "clip_value", "agc": "clip_adaptive"}
    asked, mode = draft["clip_grad"], draft["clip_mode"]
    if not asked:
        draft.idle("clip_mode", "nothing is clipped (--clip-grad)")
        draft.idle("clip_grad", "nothing is clipped")
        if rule.name == "lamb" and own:
            draft.put("optimizer.clip_norm", own, *(["opt_kwargs"] if own != _OWN_CLIP else []), note="of timm's LAMB")
        return
    if mode not in keys:
        draft.refuse("clip_mode", f"it is {', '.join(keys)}")
        return
    if rule.name == "lamb" and own and mode != "norm":
        draft.nearly(
            "clip_mode", f"timm's LAMB clips the whole gradient to a norm of {own:g} as well; here, --clip-grad alone"
        )
    limit = min(asked, own) if rule.name == "lamb" and own and mode == "norm" else asked
    draft.put(f"optimizer.{keys[mode]}", limit, "clip_grad", "clip_mode")


def put_schedule(draft: Draft) -> None:
    """The schedule's section, and the run's length."""
    name = str(draft["sched"] or "").lower()
    shapes = {"cosine": _put_cosine, "poly": _put_polynomial, "step": _put_steps, "multistep": _put_milestones}
    if name in shapes:
        shapes[name](draft)
    elif name in ("", "none"):
        draft.put("schedule.name", "constant", "sched")
        draft.put("train.duration", epochs(draft, draft["epochs"]), "epochs")
    else:
        draft.refuse("sched", "it is cosine, poly, step, multistep or none")
        _put_cosine(draft)
    _put_warmup(draft)
    for key in ("decay_milestones", "decay_epochs", "decay_rate", "min_lr"):
        draft.idle(key, f"--sched {name} does not look at it")
    if name in ("step", "multistep"):
        draft.idle("cooldown_epochs", f"--sched {name} does not look at it")
    for key in ("lr_cycle_mul", "lr_cycle_decay", "lr_cycle_limit"):
        draft.idle(key, "there is one cycle")
    draft.idle("sched_on_updates", "the rate moves with every step here")


def _put_warmup(draft: Draft) -> None:
    length, first = draft["warmup_epochs"], draft["warmup_lr"]
    if not length:
        for key in ("warmup_lr", "warmup_epochs", "warmup_prefix"):
            draft.idle(key, "there is no warm-up")
        return
    peak = draft.so_far("optimizer.lr")
    draft.put("schedule.warmup", epochs(draft, length), "warmup_epochs")
    if length > draft["epochs"] and not draft["warmup_prefix"]:
        draft.end_in_warmup(draft.so_far("train.duration"), epochs(draft, length))
        draft.put("train.until", draft.so_far("train.duration"), "epochs", note="the run ends while it warms up")
        draft.put("train.duration", epochs(draft, length), "warmup_epochs")
    if first > peak:
        draft.refuse(
            "warmup_lr" if draft.is_given("warmup_lr") else "warmup_epochs", f"{first:g} is above the peak {peak:g}"
        )
    else:
        draft.put("schedule.warmup_from", float(f"{first / peak:.12g}"), "warmup_lr", note=f"of the peak {peak:g}")
    if not draft["sched_on_updates"]:
        draft.nearly("sched_on_updates", "the rate moves with every step here; there, at the end of each epoch")
    draft.idle("warmup_prefix", "milestones are counted from the start")


def _lasts(draft: Draft) -> int:
    """Epochs of a schedule with its cycles, its warm-up aside."""
    cycles, factor, length = draft["lr_cycle_limit"], draft["lr_cycle_mul"], draft["epochs"]
    if cycles <= 1:
        return int(length)
    if draft["lr_cycle_decay"] != 1:
        draft.refuse("lr_cycle_limit", f"each cycle's peak falls by {draft['lr_cycle_decay']:g} (--lr-cycle-decay)")
    if not (1 <= factor <= _LONGEST and cycles <= _LONGEST):
        draft.refuse("lr_cycle_limit", f"cycles and the factor on their length are at most {_LONGEST} here")
        return int(length)
    if factor == 1:
        return int(length * cycles)
    return int(length * (factor**cycles - 1) / (factor - 1))


def _put_cycles(draft: Draft) -> None:
    """The run's length, and a cosine's or a polynomial's restarts."""
    lasts, warmup = _lasts(draft), draft["warmup_epochs"]
    prefix = draft["warmup_prefix"] and warmup > 0
    sources = ["epochs"]
    if draft["lr_cycle_limit"] > 1:
        sources += ["lr_cycle_limit", "lr_cycle_mul", "lr_cycle_decay"]
        draft.put("schedule.period", epochs(draft, draft["epochs"]), "epochs")
        draft.put("schedule.period_factor", draft["lr_cycle_mul"], "lr_cycle_mul")
    if prefix:
        sources += ["warmup_prefix", "warmup_epochs"]
    draft.put("train.duration", epochs(draft, lasts + (warmup if prefix else 0)), *sources)
    if warmup and not prefix:
        done = min(warmup / draft["epochs"], 1.0)
        draft.nearly(
            "warmup_prefix", f"the fall begins at the peak here; there, {done:.2%} of it are over after the warm-up"
        )


def _put_cosine(draft: Draft) -> None:
    draft.put("schedule.name", "cosine", "sched")
    _put_cycles(draft)
    draft.put("schedule.end_lr", draft["min_lr"], "min_lr")


def _put_polynomial(draft: Draft) -> None:
    draft.put("schedule.name", "polynomial", "sched")
    if draft["lr_cycle_limit"] > 1:
        draft.refuse("lr_cycle_limit", "a polynomial has no restarts here")
    _put_cycles(draft)
    draft.put("schedule.power", draft["decay_rate"], "decay_rate")
    draft.put("schedule.end_lr", draft["min_lr"], "min_lr")


def _put_steps(draft: Draft) -> None:
    warmup, every = draft["warmup_epochs"], draft["decay_epochs"]
    prefix = bool(draft["warmup_prefix"] and warmup)
    lasts = draft["epochs"] + (warmup if prefix else 0)
    draft.put("schedule.name", "step", "sched")
    if every <= 0:
        draft.refuse("decay_epochs", "a period is above 0")
        return
    if (prefix or not warmup) and (draft["sched_on_updates"] or float(every).is_integer()):
        draft.put("schedule.period", epochs(draft, every), "decay_epochs")
    else:
        # train.py counts its falls from the start, and moves the rate where an epoch ends.
        begin = warmup if prefix else 0
        ends = [begin + every * number for number in range(1, min(_MILESTONES, math.floor(lasts / every)) + 1)]
        whole = ends if draft["sched_on_updates"] else [math.ceil(end - 1e-9) for end in ends]
        falls = [epochs(draft, end) for end in whole if end < lasts]
        note = "where each fall is in effect, counted from the start"
        draft.put("schedule.milestones", falls, "decay_epochs", note=note)
    draft.put("schedule.gamma", draft["decay_rate"], "decay_rate")
    draft.put("train.duration", epochs(draft, lasts), "epochs", *(["warmup_prefix"] if prefix else []))


def _put_milestones(draft: Draft) -> None:
    warmup = draft["warmup_epochs"]
    prefix = bool(draft["warmup_prefix"] and warmup)
    begin = warmup if prefix else 0
    lasts = draft["epochs"] + begin
    draft.put("schedule.name", "step", "sched")
    # timm's falls come one epoch, or one update, before the milestone.
    early = 0 if draft["sched_on_updates"] else 1
    falls = [epochs(draft, begin + end - early) for end in draft["decay_milestones"] if 0 < begin + end - early < lasts]
    if falls:
        note = "timm falls an epoch before" if early else ""
        draft.put("schedule.milestones", falls, "decay_milestones", note=note)
        draft.put("schedule.gamma", draft["decay_rate"], "decay_rate")
    else:
        draft.put("schedule.name", "constant", "sched", note="no milestone is reached")
        draft.idle("decay_milestones", "none is reached")
    draft.put("train.duration", epochs(draft, lasts), "epochs", *(["warmup_prefix"] if prefix else []))
