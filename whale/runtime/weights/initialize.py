"""Initial weights: clones of real tensors, and meta tensors filled one at a time, equal under every plan.

A rank that holds a part of a tensor gets only that: the whole is freed before the next is filled.

    sources, strongest first      a tensor's recipe                       random numbers
    initialize(module)            the writers in the strongest source     seeded from (seed, writer, tensor) before
    _init_weights(module)         that has any, innermost module first;   each writer, on the CPU, so neither the plan
    module.reset_parameters()     weaker ones before, if it fills only    nor the device type changes a value
                                  a part

A tensor is poisoned before and checked after: an element that no writer fills is an error, never garbage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from whale.errors import InitializationError, WhaleError, raise_faults
from whale.runtime.weights.initializers import Initializer, Shadow, Slot, find_initializers, make_shadow, named_tensors

_HINT = "pass initialize=function; it is called with each module and fills its tensors in place. Or build the model on a real device"
_SENTINELS = (0x55, 0x2A)  # two bytes that differ in every bit but the highest; as booleans True and False


def initial_tensors(
    model: nn.Module,  # with real or meta tensors, or some of each
    # parameters and buffers to make, by any of their names. Tied names share one tensor, with the values of its first place in
    # ``state_dict`` order
    names: Iterable[str],
    *,
    seed: int,  # of the initial values of meta tensors
    initialize: Callable[[nn.Module], None] | None = None,  # fills a module's own tensors in place, as for ``nn.Module.apply``
    device: Callable[[str], torch.device],  # where a tensor goes, by its name
    # the part of a whole tensor to keep, by its name (the first requested one, where it has several); may return a view
    shard: Callable[[str, Tensor], Tensor] = lambda _, whole: whole,
) -> dict[str, Tensor]:
    """The tensors that a rank starts from; the model is not modified.

    Returns:
        Per name a leaf tensor with its own memory, of the model's dtype and ``requires_grad``.

    Raises:
        InitializationError: an unknown name, a meta tensor that nothing fills completely, or an initialiser that fails.
    """
    wanted = list(names)
    originals = named_tensors(model)
    unknown = [name for name in wanted if name not in originals]
    raise_faults([InitializationError(f"the model has no parameter or buffer named {name!r}") for name in unknown])
    made: dict[int, Tensor] = {}
    builder = _Builder(model, seed, initialize) if any(originals[name].is_meta for name in wanted) else None
    with _private_random_numbers(), torch.no_grad():
        for name in wanted:
            original = originals[name]
            if id(original) in made:
                continue
            value = _kept(original, name, builder, shard, device(name))
            if value is not None:
                made[id(original)] = value
    if builder is not None:
        builder.raise_faults()
    return {name: made[id(originals[name])] for name in wanted}


def _kept(
    original: Tensor, name: str, builder: _Builder | None, shard: Callable[[str, Tensor], Tensor], device: torch.device
) -> Tensor | None:
    """The part of a tensor to keep, in memory shared with neither the user's nor the whole tensor; None if nothing fills it."""
    whole = original.detach() if builder is None or not original.is_meta else builder.fill(name)
    if whole is None:
        return None
    part = shard(name, whole).to(device)
    if part.shape != whole.shape:
        part = part.contiguous()
    is_ours = part is whole and original.is_meta
    if not is_ours and part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
        part = part.clone()
    return nn.Parameter(part, requires_grad=original.requires_grad) if isinstance(original, nn.Parameter) else part


@contextmanager
def _private_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        yield


class _Builder:
    """Fills meta tensors of a model, and collects those that cannot be filled."""

    def __init__(self, model: nn.Module, seed: int, initialize: Callable[[nn.Module], None] | None) -> None:
        self.seed = seed
        self.shadow: Shadow = make_shadow(model)
        self.sources = find_initializers(self.shadow, initialize)
        self.unfilled: list[Slot] = []
        self.faults: list[WhaleError] = []

    def fill(self, name: str) -> Tensor | None:
        """The filled tensor on the CPU; None, and a fault, if nothing fills it."""
        slots = self.shadow.ties(self.shadow.by_name[name])
        try:
            for slot in slots:
                for recipe in self._recipes(slot):
                    value = self._filled(slot, recipe)
                    if value is not None:
                        return value
        except InitializationError as fault:
            self.faults.append(fault)
            return None
        self.unfilled.append(slots[0])
        return None

    def raise_faults(self) -> None:
        """Raises all faults, with all unfilled tensors as one."""
        if self.unfilled:
            listing = "".join(f"\n  {slot}" for slot in self.unfilled)
            message = f"a model on the meta device needs its tensors filled, and nothing fills these {len(self.unfilled)}:{listing}"
            self.faults.append(InitializationError(message, hint=_HINT))
        raise_faults(self.faults)

    def _recipes(self, slot: Slot) -> Iterator[tuple[Initializer, ...]]:
        """The writers of the strongest source that has any, then with weaker ones before them."""
        recipe: tuple[Initializer, ...] = ()
        for source in self.sources:
            writers = tuple(initializer for initializer in source if slot in initializer.written)
            if writers:
                recipe = writers + recipe
                yield recipe

    def _filled(self, slot: Slot, recipe: Sequence[Initializer]) -> Tensor | None:
        dtype = slot.original.dtype
        if dtype.is_floating_point or dtype.is_complex:
            value = self._build(slot, recipe, 0)
            return None if _has_nan(value) else value
        values = [self._build(slot, recipe, sentinel) for sentinel in _SENTINELS]
        untouched = values[0] == _mark(_SENTINELS[0], dtype)
        untouched &= values[1] == _mark(_SENTINELS[1], dtype)
        return None if bool(untouched.any()) else values[0]

    def _build(self, slot: Slot, recipe: Sequence[Initializer], sentinel: int) -> Tensor:
        """Runs a recipe on one tensor; the others are on the meta device unless their values flow into it."""
        value = _poisoned(slot.original, sentinel)
        for position, writer in enumerate(recipe):
            together = {slot: value}
            for other in writer.group(slot):
                if other is not slot:
                    before = tuple(earlier for earlier in recipe[:position] if other in earlier.written)
                    together[other] = self._build(other, before, sentinel)
            value = self._run(writer, slot, together)
        return value

    def _run(self, writer: Initializer, slot: Slot, data: Mapping[Slot, Tensor]) -> Tensor:
        part = f"{writer.label}\0{writer.group(slot)[0].name}"
        digest = hashlib.blake2b(f"{self.seed}\0{part}".encode(), digest_size=7).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest, "big"))
        try:
            for place, value in data.items():
                place.put(value)
            writer.run()
            result = slot.get()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise InitializationError(f"{writer.label} failed on {slot}: {reason}", hint=_HINT) from error
        finally:
            for place in writer.touched | data.keys():
                place.clear()
        if result is None or result.is_meta or result.shape != slot.original.shape or result.dtype != slot.original.dtype:
            raise InitializationError(f"{writer.label} changed the shape or type of {slot}", hint=_HINT)
        return result.detach()


def _poisoned(original: Tensor, sentinel: int) -> Tensor:
    """A tensor of equal shape and strides, full of NaN or of a sentinel."""
    value = torch.empty_strided(original.shape, original.stride(), dtype=original.dtype, device="cpu")
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return value.fill_(float("nan"))
    return value.fill_(_mark(sentinel, value.dtype))


def _mark(sentinel: int, dtype: torch.dtype) -> int:
    return sentinel == _SENTINELS[0] if dtype == torch.bool else sentinel


def _has_nan(value: Tensor) -> bool:
    if value.numel() == 0:
        return False
    if value.dtype.is_complex:
        value = torch.view_as_real(value)
    if value.dtype.itemsize == 1:  # torch has no arithmetic on 8-bit floats
        value = value.float()
    return bool(value.min().isnan())  # min propagates NaN, and needs no memory
