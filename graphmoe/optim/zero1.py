"""ZeRO-1 (arXiv 1910.02054): fp32 master weights sharded in flat buffers. No device sync.

A step reduce-scatters gradients, computes the norm and updates shards; the next one gathers weights. With
``optim.grad_shard`` (ZeRO-2) gradients are reduced after each micro-batch and added up in shards, and with
``parallel.dp_shard=fsdp2`` (ZeRO-3) weights are gathered for each use.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from graphmoe.checkpoint.flat_shards import FlatShard, shards_of
from graphmoe.config.schema import GradDtype, MasterDtype, OptimConfig, TrainConfig
from graphmoe.ops.gradients import Gradient
from graphmoe.optim.base import Function, StepOptimizer, StepResult, count_step, norm_of
from graphmoe.optim.flat_buffers import Fill, families_of, share_memory
from graphmoe.optim.offload import HostState
from graphmoe.optim.qk_clip import QkClip
from graphmoe.optim.reduction import GradientReduction, WeightGather
from graphmoe.optim.rule import StepScalars
from graphmoe.optim.shared_slots import SlotReduction
from graphmoe.optim.storage import Kind, Region, Storage, update_stored
from graphmoe.optim.weight_slots import WeightSlots
from graphmoe.plan.layout import ALONE, layout_of
from graphmoe.plan.slots import layers_of
from graphmoe.runtime.capture import TensorSlot
from graphmoe.runtime.compile.executor import CompiledSegments
from graphmoe.runtime.compile.weight_forms import WeightForms
from graphmoe.runtime.ranks import Mesh
from graphmoe.segments import Executor

SUMS_OF_STEP = 2**12  # numbers of a step's keys; more micro-batches reuse those of the next step
T = TypeVar("T")


class Optimizer(StepOptimizer):
    """StepOptimizer over flat buffers, which the model's parameters become views of."""

    def __init__(
        self, model: nn.Module, optim: OptimConfig, train: TrainConfig, mesh: Mesh | None = None, *,
        fill: Fill | None = None, in_turns: bool = False,
    ) -> None:  # fmt: skip
        """``fill`` sets weights, which are without memory yet: they are sharded too (ZeRO-3).

        ``in_turns``: forwards and backwards of two micro-batches run in turns.
        """
        super().__init__(optim, train, mesh or Mesh(ALONE), next(model.parameters()).device)
        self.model, self.model_is_whole = model, fill is None
        trained, self.frozen = dict[str, nn.Parameter](), dict[str, Tensor]()
        for name, weight in model.named_parameters():
            (trained if weight.requires_grad else self.frozen)[name] = weight
        self.names, self.weights = [*trained], [*trained.values()]
        assert all(w.dtype == self.weights[0].dtype for w in self.weights)
        elements = optim.bucket_mb * 1e6 / torch.float32.itemsize
        is_rounded = self.weights[0].dtype != torch.float32
        in_place = is_rounded and optim.master_dtype is MasterDtype.bf16
        rounds_sums = is_rounded and optim.grad_dtype is GradDtype.bf16
        dtype = torch.bfloat16 if rounds_sums else torch.float32
        storage = Storage(optim.moment_dtype, in_place, train.seed, optim.offload, dtype)
        self._shards_gradients = optim.grad_shard or fill is not None
        named = [name for name, _ in model.named_parameters()]
        made = model, self.mesh, elements, self.rule, storage
        self.families = families_of(*made, shares_slots=self._shards_gradients, fill=fill)
        of_slots = share_memory(self.families, named, 1 + in_turns)
        self.rounds = is_rounded and not in_place
        self.update_stored = update_stored
        totals = self._by_name({name: g for f in self.families for name, g in f.gradient_views().items()})
        gradients = {name: Gradient(total) for name, total in totals.items()}
        self._keys: Tensor | None = None  # by which sums of gradients are rounded, int32
        if rounds_sums:
            seeds = self._by_name({name: seed for f in self.families for name, seed in f.seeds().items()})
            self._seeds = torch.tensor([*seeds.values()]).to(self.applied.device, torch.int32)
            self._keys = self._seeds.clone()
            for gradient, key in zip(gradients.values(), self._keys.unbind(), strict=True):
                gradient.key = key
        self._gradients = {id(w): g for w, g in zip(self.weights, gradients.values(), strict=True)}
        # weak: the garbage collector doesn't see autograd's hooks, and would free neither
        collect = weakref.WeakMethod(self._collect)
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook(functools.partial(_if_alive, collect))
        self.qk_clip = QkClip(model, self.families, self.mesh, optim.qk_clip) if optim.qk_clip else None
        pairs = [(family, region) for family in self.families for region in family.regions()]
        regions = [region for _, region in pairs]
        self._counted_by = [family.num_replicas for family, _ in pairs]  # ranks that have the same shard
        self._gradient_shards = [region.grad for region in regions]
        self._host = HostState(regions, self.applied.device) if optim.offload else None
        self._pieces: dict[Kind, Function] = {}  # compiled updates of staged pieces
        self._regions = [] if self._host else regions  # updated at once
        self._reduction = GradientReduction(self.families, gradients, of_slots)
        self._slot_reduction = SlotReduction(of_slots, gradients)
        in_slots = [] if fill is None else of_slots
        self._weight_gather = WeightGather(self.families, in_slots)
        self._weight_slots = WeightSlots(in_slots, gradients, layers_of(named), 1 + in_turns)
        self.weight_forms: WeightForms = WeightForms(self._restorable())
        self._alone = self.mesh.group("world") is None
        self._norm: Function = self._norm_of_shards
        self._fuses_norm = self._alone and self._host is None
        self._update: Function = self._norm_and_update if self._fuses_norm else self._update_in_place

    def compile(self, compiler: Callable[[Function, Sequence[Tensor]], Function]) -> None:
        """Compile the update; on several ranks the norm separately, as it is summed over ranks.

        With state in host memory, once for each kind of piece.
        """
        arguments = self._arguments(self.applied)
        if not self._fuses_norm:
            self._norm = compiler(self._norm, self._gradient_shards)
            arguments.insert(0, self.applied)
        for staged in self._host.regions if self._host else ():
            if staged.kind not in self._pieces:
                update = functools.partial(self._update_piece, staged, fused=False)
                given = [*self._scalar_arguments(arguments), *staged.tensors]
                self._pieces[staged.kind] = compiler(update, given)
        self._update = compiler(functools.partial(self._update, fused=False), arguments)

    def executor(self, execute: Executor) -> Executor:
        if not (self.model_is_whole or isinstance(execute, CompiledSegments)):  # its units gather weights
            execute = functools.partial(self._weight_slots.execute, execute)
        if self.qk_clip is not None:
            execute = functools.partial(self.qk_clip.execute, execute)
        return execute if self._alone else functools.partial(self._weight_gather.execute, execute)

    def start_gather(self) -> None:
        self.weight_forms.changed()
        self._weight_slots.changed()
        self._weight_gather.start()

    def restore_weights(self) -> None:
        self.weight_forms.changed()

    def gather(self) -> None:
        self.start_gather()
        self._weight_gather.wait()

    @torch.no_grad()
    def step(self, loss: Tensor) -> StepResult:
        if self._host:
            self._host.start()
        self._weight_gather.wait()  # reads what the update writes
        self._weight_slots.settle()
        self._slot_reduction.finish()
        self._reduction.finish()
        for family in self.families:
            family.sum_replicas()
        for gradient in self._gradients.values():
            gradient.finish()
        arguments = self._arguments(loss.detach().float())
        self.weight_forms.written()
        if not self._fuses_norm:
            (own,) = self._norm(*self._gradient_shards)
            arguments.insert(0, own.float() if self._alone else self._over_ranks(own))
        if self._host:
            self._host.update(functools.partial(self._update_staged, self._scalar_arguments(arguments)))
        result = StepResult(*self._update(*arguments))
        self._renew_keys()
        if self.qk_clip is None:
            return result
        return result._replace(max_logit=self.qk_clip.apply(result.finite))

    def own_gradients(self) -> list[Tensor]:
        return [] if self._alone else [family.grad for family in self.families if family.grad is not None]

    def model_state(self) -> dict[str, Tensor | FlatShard]:
        self.gather()
        own = {} if self.model_is_whole else self._none_owned() | self._entries("weight_shard")
        return shards_of(self.model, self.mesh.layout, self.mesh.rank, own)

    def restored(self, state: Mapping[str, Any]) -> None:
        super().restored(state)
        self._settle()
        self._renew_keys()
        for family in self.families:
            family.shard_weights()
        self.publish()

    def fixed_tensors(self) -> dict[str, TensorSlot]:
        found: dict[str, TensorSlot] = {}
        for name, gradient in zip(self.names, self._gradients.values(), strict=True):
            found[f"the gradient of {name}"] = vars(gradient), "total"
            if gradient.key is not None:
                found[f"the key of the gradient of {name}"] = vars(gradient), "key"
        holders = [("", vars(self))]
        for family in self.families:
            which = f" over {family.axis}" if len(self.families) > 1 else ""
            which += " of matrices" * family.of_matrices
            holders += [(which, vars(family)), (which, family.moments), (which, family.rows)]
            holders += [(f" staging{which}", vars(family.staging))] if family.staging else []
        for which, holder in holders:
            for name in [name for name, value in holder.items() if isinstance(value, Tensor)]:
                found[f"the optimizer's {name.lstrip('_')}{which}"] = holder, name
        if self.qk_clip:
            found["the bounds of attention logits"] = vars(self.qk_clip), "bound_LH"
        if self.scales:
            for name in ("_scale_PW", "_largest_PW", "history_SP"):
                found[f"the delayed scales' {name}"] = vars(self.scales), name
        return found

    @property
    def slots(self) -> list[Tensor]:
        """Return the device memory through which state in host memory is updated."""
        return self._host.slots if self._host else []

    def gradient_of(self, weight: Tensor) -> Gradient:
        return self._gradients[id(weight)]

    @property
    def main(self) -> list[Tensor]:
        return [*self._gathered_main().values()]

    def weights_to_fill(self) -> Mapping[str, Tensor | FlatShard]:
        """Gather unsharded master weights by parameter name, into the memory of gradients. A collective.

        Without master weights, bf16 weights into their own memory; frozen weights are the model's own. With
        ``optim.grad_shard`` this rank's shards, which are filled in place.
        """
        frozen = {name: weight.detach() for name, weight in self.frozen.items()}
        if (self._shards_gradients or self._keys is not None) and not self._alone:
            return self._none_owned() | self._entries("main") | frozen
        return self._gathered_main() | frozen

    def _none_owned(self) -> dict[str, FlatShard]:
        here, pairs = (self.mesh.layout, self.mesh.rank), zip(self.names, self.weights, strict=True)
        return {n: FlatShard(w.detach().view(-1)[:0], 0, w.shape, layout_of(w), *here) for n, w in pairs}

    def _gathered_main(self) -> dict[str, Tensor]:
        self._settle()
        found = dict[str, Tensor]()
        for family in self.families:
            into = None if self._keys is not None else family.grad
            found |= family.gathered(family.main, family.weight if family.storage.in_place else into)
        return self._by_name(found)

    @torch.no_grad()
    def adopt(self, weights: Mapping[str, Tensor | FlatShard]) -> None:
        for family in self.families:
            for name, (start, own) in family.owned(family.main).items():
                if isinstance(weight := weights[name], Tensor):  # else it was filled in place
                    own.copy_(weight.reshape(-1)[start : start + own.numel()])
        self.publish()
        self.gather()

    @torch.no_grad()
    def publish(self) -> None:
        for family in self.families:
            if self.rounds:
                family.weight_shard.copy_(family.main)
        self.weight_forms.written()

    def _restorable(self) -> dict[int, Tensor]:
        # from host memory they would be restored as slowly as updated
        whole = [f for f in self.families if f.group is None and self.rounds and not f.storage.offload]
        mains = [(family, family.views(family.main)) for family in whole]
        return {id(w): main for f, views in mains for w, main in zip(f.weights, views.values(), strict=True)}

    def _renew_keys(self) -> None:
        if self._keys is not None:  # a resumed run has the same
            self._keys.copy_(self._seeds + self.applied.to(torch.int32) * SUMS_OF_STEP)

    def _by_name(self, tensors: Mapping[str, T]) -> dict[str, T]:
        return {name: tensors[name] for name in self.names}

    def _entries(self, kind: str) -> dict[str, Any]:
        found, here = dict[str, Any](), (self.mesh.layout, self.mesh.rank)
        self._settle()
        for family in self.families:
            if kind not in (*family.moments, "main", "weight_shard"):
                continue
            flat = family.moments[kind] if kind in family.moments else getattr(family, kind)
            weights = dict(zip(family.names, family.weights, strict=True))
            if encoded := family.encoded(kind):
                flat = torch.empty(flat.shape, device="meta")
            elif self._alone:
                found |= family.views(flat)
                continue
            for name, (start, own) in family.owned(flat).items():
                shape, parallel = weights[name].shape, layout_of(weights[name])
                found[name] = FlatShard(own, start, shape, parallel, *here, encoded.get(name))
        return {name: found[name] for name in self.names if name in found} if self._alone else found

    def _collect(self, weight: Tensor) -> None:
        if weight.grad is not None:  # None: its kernel has added it already
            self.gradient_of(weight).add(weight.grad)
            weight.grad = None

    def _settle(self) -> None:
        if self._host:
            self._host.settle()

    def _arguments(self, loss: Tensor) -> list[Tensor]:
        tensors = [tensor for region in self._regions for tensor in region.tensors]
        return [loss, *self._counters().values(), self.void, self._numbers, *tensors]

    def _scalar_arguments(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        norm, loss, applied = arguments[:3]
        return [norm, loss, applied, self.void, self._numbers]

    def _update_staged(self, scalars: Sequence[Tensor], staged: Region) -> None:
        update = self._pieces.get(staged.kind) or functools.partial(self._update_piece, staged)
        update(*scalars, *staged.tensors)

    def _update_piece(
        self, like: Region, norm: Tensor, loss: Tensor, applied: Tensor, void: Tensor, numbers: Tensor,
        *tensors: Tensor, fused: bool = True,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        scalars = self._scalars(norm, loss, applied, void, numbers)
        self._update_region(like.of(tensors), scalars, fused=fused)
        return ()

    def _norm_of_shards(self, *gradients: Tensor) -> tuple[Tensor]:
        return (norm_of(gradients, self._counted_by),)

    def _norm_and_update(self, *arguments: Tensor, fused: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        flats = arguments[-sum(len(region.tensors) for region in self._regions) :]
        (norm,) = self._norm_of_shards(*(region.grad for region in self._regions_of(flats)))
        return self._update_in_place(norm.float(), *arguments, fused=fused)

    def _update_in_place(
        self, norm: Tensor, loss: Tensor, applied: Tensor, skipped: Tensor, skipped_in_row: Tensor,
        longest_skip: Tensor, void: Tensor, numbers: Tensor, *flats: Tensor, fused: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        scalars = self._scalars(norm, loss, applied, void, numbers)
        for region in self._regions_of(flats):
            self._update_region(region, scalars, fused=fused)
        done = scalars.ok.float()
        count_step(done, void, applied, skipped, skipped_in_row, longest_skip)
        return norm, scalars.lr, done

    def _update_region(self, region: Region, scalars: StepScalars, *, fused: bool) -> None:
        rule, main = region.rule, region.main
        own = scalars._replace(numbers=scalars.of_matrices) if rule is self.rule.matrices else scalars
        if region.origins:
            self.update_stored(region, own, eager=fused)
            return
        lists = [main], [region.grad], [[moment] for moment in region.moments]
        rule.apply(*lists, config=self.config, decays=region.decays, scalars=own, fused=fused)
        for weight in region.rounded:
            weight.copy_(main)

    def _regions_of(self, flats: Sequence[Tensor]) -> list[Region]:
        given = iter(flats)
        return [region.of(given) for region in self._regions]


@torch.no_grad()
def _if_alive(collect: Callable[[], Callable[[Tensor], None] | None], weight: Tensor) -> None:
    call = collect()
    if call is not None:
        call(weight)
