"""What a checkpoint has of a training beside the weights: the optimizers' state and the random state."""

from collections.abc import Iterable

import torch
from torch import Tensor

from parallel.shard import as_in
from training.optimizer import Muon


def optimizer_tensors(
    optimizers: list[torch.optim.Optimizer], named_parameters: Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """The optimizers' state as {"NAME.exp_avg": tensor, ...}, not copied. Each parameter belongs to one optimizer.

    torch's own state_dict() numbers the parameters. A new parameter, or other groups, would silently shift all numbers
    after it, so we use names. Learning rates and the like are not saved: the step and the configuration determine them.
    The order is the same in every process, as Writer.save and give() need it. That of a state is not: safetensors gives
    what it has loaded in an order that differs between processes.
    """
    return {
        f"{name}.{key}": value
        for name, parameter in named_parameters
        for optimizer in optimizers
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
    }


def load_optimizer_tensors(
    optimizers: list[torch.optim.Optimizer],
    named_parameters: Iterable[tuple[str, Tensor]],
    tensors: dict[str, Tensor],
) -> None:
    """Restore the state from optimizer_tensors, bit for bit. Skips NAME.trained and the entries of rng_state().

    Raises ValueError if a tensor belongs to no parameter or has another shape: then it comes from another model.
    """
    owner = {p: (o, group) for o in optimizers for group in o.param_groups for p in group["params"]}
    parameters = dict(named_parameters)
    for optimizer in optimizers:
        optimizer.state.clear()
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(".")
        if name == "rng" or key == "trained":
            continue
        p = parameters.get(name)
        if p is None or (key != "step" and (tensor.shape, tensor.dtype) != (p.shape, p.dtype)):
            ours = "has no such weight" if p is None else f"has {tuple(p.shape)} {p.dtype} there"
            raise ValueError(
                f"the checkpoint's optimizer has {full_name} {tuple(tensor.shape)} {tensor.dtype}, this model {ours}: "
                "resume with the configuration that the checkpoint was made with"
            )
        optimizer, group = owner[p]
        if (key == "momentum_buffer") != isinstance(optimizer, Muon):
            raise ValueError(f"the checkpoint has {full_name}, of another optimizer than the run's: use its optimizer=")
        # The step count is on the CPU, unless a fused kernel reads it: reading it from the GPU would synchronise for
        # every parameter. We clone because safetensors' tensors are views into one buffer, perhaps not aligned.
        on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
        tensor = tensor.to("cpu" if on_host else p.device).clone()
        optimizer.state[p][key] = tensor if key == "step" else as_in(tensor, p)


def rng_state() -> dict[str, Tensor]:
    """The states of torch's default generators: {"rng.cpu": uint8 (5056,), "rng.cuda": uint8 (16,)}. rng.cuda, of the
    current device, is there only if CUDA is in use: reading it in a CPU run would take GPU memory."""
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["rng.cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        states["rng.mps"] = torch.mps.get_rng_state()
    return states


def set_rng_state(tensors: dict[str, Tensor]) -> None:
    """Restore the states from rng_state. Skips other names, and CUDA's state if there is no CUDA."""
    try:
        torch.set_rng_state(tensors["rng.cpu"].clone())
        if "rng.cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["rng.cuda"].clone())
        if "rng.mps" in tensors and torch.backends.mps.is_available():
            torch.mps.set_rng_state(tensors["rng.mps"].clone())
    except RuntimeError as error:  # bytes that no generator has
        raise ValueError(
            f"the checkpoint's random state cannot be used ({error}): resume another checkpoint"
        ) from error
