"""initialize(): what a program gives (model, optimizer, schedule, configuration, data) becomes an engine."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from . import _ballast, configuration, optimizer as optimizers
from ._ballast import ConfigError, UseError
from .distributed import init_distributed, world_of
from .engine import Engine
from .optimizer import Optimizer


def _groups_of(parameters: Iterable, settings: dict, names: dict[torch.Tensor, str]) -> dict:
    """The configuration's optimizer section with model_parameters' groups taken in."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    covered = set()
    described = []
    for group in groups:
        own = {key: optimizers._plain(value) for key, value in group.items() if key not in ("params", "name")}
        patterns = []
        members = [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
        for parameter in members:
            if isinstance(parameter, tuple):  # of named_parameters()
                parameter = parameter[1]
            if not isinstance(parameter, torch.Tensor) or parameter not in names:
                raise ConfigError(
                    "[engine.initialize] model_parameters has a tensor that is no parameter of the model (shape "
                    f"{list(getattr(parameter, 'shape', []))}; pass model.parameters())"
                )
            if names[parameter] in covered:
                raise ConfigError(
                    f"[engine.initialize] a parameter stands twice in model_parameters ({names[parameter]}; give it to one group)"
                )
            covered.add(names[parameter])
            patterns.append(optimizers._pattern(names[parameter]))
        described.append({"patterns": patterns, **own})
    missing = [name for parameter, name in names.items() if parameter.requires_grad and name not in covered]
    if missing:
        raise ConfigError(
            f"[engine.initialize] trainable parameters that model_parameters lacks ({', '.join(missing[:4])}"
            f"{', ...' if len(missing) > 4 else ''}; add them, or call requires_grad_(False) on them)"
        )
    described = [group for group in described if group["patterns"]]
    if len(described) > 1 or (described and len(described[0]) > 1):
        params = settings.get("params", {})
        if params.get("groups"):
            raise ConfigError(
                "[engine.initialize] parameter groups twice (in model_parameters and in optimizer.params.groups; give one)"
            )
        # The first group is the engine's own, so that param_groups are those given; the others keep the configured values.
        first = {key: value for key, value in described[0].items() if key != "patterns"}
        effective = json.loads(_ballast.effective_config(json.dumps({"optimizer": settings})))["optimizer"]["params"]
        kept = {key: effective[key] for key in first if key in effective}
        groups = [{**kept, **group} for group in described[1:]]
        settings = {**settings, "params": {**params, **first, **({"groups": groups} if groups else {})}}
    return settings


def _check_modules(module: torch.nn.Module, path: str, around: list[torch.nn.Module], seen: set[int]) -> None:
    """UseError for what no engine can take over: a module that is a part of itself, a tensor that has no shape yet."""
    if any(module is one for one in around):
        raise UseError(
            f"[engine.initialize] a module is a part of itself ({path} is a {type(module).__name__} that it stands in; hold "
            "what isn't a child where PyTorch doesn't register it, as in a list)"
        )
    if id(module) in seen:
        return
    seen.add(id(module))
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if is_lazy(tensor):
            raise UseError(
                f"[engine.initialize] a parameter or buffer has no shape yet ({path}{'.' if path else ''}{name} of a "
                f"{type(module).__name__}; run a batch through the module before ballast.initialize)"
            )
    for name, child in module._modules.items():
        if child is not None:
            _check_modules(child, f"{path}{'.' if path else ''}{name}", [*around, module], seen)


def _make_loader(data, batch_size: int, world, collate_fn):
    sampler = None
    if not isinstance(data, torch.utils.data.IterableDataset):
        sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=world.size, rank=world.rank)
    return torch.utils.data.DataLoader(data, batch_size=batch_size, sampler=sampler, collate_fn=collate_fn)


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable | None = None,
    model_parameters: Iterable | None = None,
    training_data: torch.utils.data.Dataset | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable | None = None,
    config: dict | str | os.PathLike | None = None,
    mesh_param: Any = None,
    config_params: dict | str | None = None,
    *,
    device: str | torch.device | None = None,
) -> tuple[Engine, Optimizer, Any, Any]:
    """Shards a module over the ranks and returns (engine, optimizer, dataloader, lr_scheduler), as deepspeed.initialize.

    model: any torch.nn.Module; it stays the object that you call. Collective.
    optimizer: a torch.optim Adam, AdamW or SGD, or a callable that makes one from parameters; its groups,
        hyper-parameters and states are taken over. None: what the configuration names.
    model_parameters: for a configured optimizer; parameters, or groups with their own lr, weight_decay, ...
    training_data: a Dataset; the returned loader gives micro-batches, each rank its part.
    lr_scheduler: one of torch.optim.lr_scheduler, or a callable that makes one from the optimizer; engine.step() steps
        it after every applied step.
    config (or args.deepspeed_config): a dict or a path, docs/config.md.
    device: "cpu", "cuda:0", ...; None for the local rank's GPU where there is one, else the CPU.
    Raises ConfigError, UseError, MemoryError, CommError.
    """
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise UseError(f"[engine.initialize] no model or sequence parallelism here ({name}; leave it None)")
    if isinstance(args, torch.nn.Module):
        raise UseError(
            "[engine.initialize] the first argument is args, as in DeepSpeed (pass model= and config= by name)"
        )
    if not isinstance(model, torch.nn.Module):
        raise UseError(
            f"[engine.initialize] no model (model= is {model!r}; pass a torch.nn.Module, made, not its class)"
        )
    given = [one for one in (config, config_params, getattr(args, "deepspeed_config", None)) if one is not None]
    if len(given) != 1:
        raise ConfigError(
            f"[engine.initialize] {'two configurations' if given else 'no configuration'} (pass one config=, a dict or a path, "
            "or args.deepspeed_config)"
        )
    config = given[0]
    if torch.is_inference_mode_enabled():
        raise UseError("[engine.initialize] called in inference mode, where no tensor can be trained (call it outside)")
    if distributed_port is not None:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    if dist_init_required:
        init_distributed()

    _check_modules(model, "", [], set())
    settings = configuration.read(config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model_parameters) if model_parameters is not None else list(model.parameters()))
        if optimizer is None:
            raise ConfigError("[engine.initialize] optimizer= made none (got None; return the optimizer)")
    if optimizer is not None:
        if "optimizer" in settings:
            raise ConfigError(
                '[engine.initialize] two optimizers (optimizer= and the configuration\'s "optimizer"; give one)'
            )
        settings["optimizer"] = optimizers.describe(optimizer, names)
    elif "optimizer" not in settings:
        warnings.warn(
            "ballast.initialize: no optimizer was given, so AdamW with lr 0.001 trains (pass optimizer=, or name one in the "
            'configuration\'s "optimizer")',
            stacklevel=2,
        )
    if optimizer is None and model_parameters is not None:
        settings["optimizer"] = _groups_of(model_parameters, settings.get("optimizer", {}), names)
    if lr_scheduler is not None and "scheduler" in settings:
        raise ConfigError(
            '[engine.initialize] two schedules (lr_scheduler= and the configuration\'s "scheduler"; give one)'
        )

    if lr_scheduler is not None and not callable(lr_scheduler):
        if not hasattr(lr_scheduler, "step"):
            raise ConfigError(
                f"[engine.initialize] not a schedule (lr_scheduler={lr_scheduler!r}; pass one of torch's, or a callable)"
            )
        if getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigError(
                "[engine.initialize] the schedule is of another optimizer (make it from the one that is passed as optimizer=, or "
                "pass a callable that makes it from the engine's)"
            )

    world = world_of(device, float(settings.get("comm_timeout_seconds", 600)))
    engine = Engine(model, settings, world, optimizer, names)
    if callable(lr_scheduler) and (isinstance(lr_scheduler, type) or not hasattr(lr_scheduler, "step")):
        lr_scheduler = lr_scheduler(engine.optimizer)
        if not callable(getattr(lr_scheduler, "step", None)):
            engine.destroy()
            raise ConfigError(f"[engine.initialize] lr_scheduler= made no schedule (got {type(lr_scheduler).__name__})")
    engine.lr_scheduler = lr_scheduler
    loader = None
    if training_data is not None:
        loader = _make_loader(training_data, engine.train_micro_batch_size_per_gpu(), world, collate_fn)
        engine.training_dataloader = loader
    return engine, engine.optimizer, loader, lr_scheduler
