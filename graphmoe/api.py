"""A model and its optimizer for a training loop of your own (docs/api.md).

Suffixes: B sequences, S their tokens, D hidden, V vocabulary, T positions, L MoE layers, E experts, K those
of a token.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from graphmoe.checkpoint.hf.folder import hf_entries
from graphmoe.checkpoint.hf.tensor_files import Index, TensorToWrite
from graphmoe.checkpoint.store import CheckpointStore
from graphmoe.command.hydra import compose_config, read_words
from graphmoe.config.schema import ConfigError, DpShard, MoEConfig, RunConfig
from graphmoe.model.layer import MoEOutput
from graphmoe.model.moe_segments import update_selection_bias
from graphmoe.ops.collectives import all_gather_into, use_groups
from graphmoe.plan.experts import WORST_CASE, has_experts
from graphmoe.plan.layout import layout_of
from graphmoe.plan.plan import Plan
from graphmoe.run.machine import open_device
from graphmoe.runtime.dispatch import close_dispatcher, make_dispatcher, open_dispatcher
from graphmoe.runtime.dispatch.symm import share_axes
from graphmoe.runtime.host.files import temporary_folder
from graphmoe.runtime.ranks import Mesh, sums
from graphmoe.segments import Executor, Segment
from graphmoe.training.build import build
from graphmoe.training.executor import Execution
from graphmoe.training.export import write_folder
from graphmoe.training.run import open_worker
from graphmoe.training.saves import Chosen, random_state, restore_random_state, seed_everything
from graphmoe.training.setup import import_weights
from graphmoe.worker import join

OWN = "data=synthetic", "graph.scope=none", "pipeline.ep_overlap=false"  # no graph captures a loss of yours
ROUTER = "moe_router"
ROWS = 2048  # positions whose logits are in memory at once


class Trainer:
    """A model with compiled segments and its optimizer, for a loop of your own.

    In a script that torchrun starts, all ranks call the methods in the same order, each with its own
    sequences. It is a context manager, which ends what the ranks share.
    """

    def __init__(self, *overrides: str) -> None:
        """``overrides``: as of `graphmoe train`, such as "checkpoint.init_from=FOLDER". Collective.

        Their data, batch sizes and number of steps count only for learning rates, the choice of kernels and
        the longest sequence. *Raises* ConfigError.
        """
        config = compose_config(*read_words([*OWN, *overrides]), complete=_with_own_loss)
        self._ranks = join(config)
        self.plan, _ = open_worker(config, self._ranks)
        _check(self.plan)
        self._mesh, self.device = Mesh(self.plan.layout), open_device(self.plan.run.device)
        use_groups(self._mesh)
        share_axes(self._mesh, self._ranks, self.device)
        open_dispatcher(self.plan, self._mesh, self.device)
        seed_everything(self.plan.train.seed, self.plan.precision, self.device)
        dispatcher = make_dispatcher(self.plan, self._mesh)
        self.model, self.optimizer = build(self.plan, self.device, self._mesh, dispatcher)
        import_weights(self.plan, self._ranks, self.model, self.optimizer)
        self._open, self._stores = ExitStack(), dict[Path, CheckpointStore]()
        folder = self._open.enter_context(temporary_folder("graphmoe_trainer_"))
        how = self.device, self.optimizer, self._ranks, folder, Chosen()
        self._execution = Execution(self.plan, *how)
        self._execution.compile_update(self.optimizer, self.model.segment_lists())
        self._execute = self.optimizer.executor(self._execution.execute)
        self._is_stale = False  # whether other ranks have updated weights of this one
        self._router_losses: list[Tensor] = []
        self._num_calls = 0  # of `log_probs` with a gradient, in this micro-batch
        self._counts_LE = torch.zeros(self.model.num_moe_layers, self.plan.model.num_experts).to(self.device)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        close_dispatcher()

    def log_probs(self, tokens_BS: Tensor, routes_BSLK: Tensor | None = None) -> Tensor:
        """Return the log-probability, fp32 [B, S - 1], of each token but the first, given those before it.

        Collective. Within `step` it has a gradient. Logits of `ROWS` positions are in memory at once.
        ``routes_BSLK``: experts that replace the routers' choice, of the form of `routes`; -1 in all K
        places keeps a token's own choice. Syncs the device. *Raises* ConfigError.
        """
        tokens_BS, head, execute = tokens_BS.to(self.device), self.model.loss_head, self._execute
        if routes_BSLK is not None:
            execute = replaying(execute, self._layers_of(routes_BSLK, tokens_BS))
        x_BSD, outputs = self._states(tokens_BS, execute)
        segments = head.segments(head.norm, loss=False)
        (h_BSD,) = self._execute(segments, {"x": x_BSD}, ("normed",))
        if torch.is_grad_enabled():
            self._num_calls += 1
            for layer, output in enumerate(outputs):
                self._router_losses.append(output.loss)
                self._counts_LE[layer] += output.counts_E

        def of_rows(h_TD: Tensor, label_T: Tensor) -> Tensor:
            return -F.cross_entropy(head.head(h_TD).float(), label_T, reduction="none")

        rows = zip(h_BSD.flatten(0, 1).split(ROWS), tokens_BS[:, 1:].flatten().split(ROWS), strict=True)
        found = [checkpoint(of_rows, *each, use_reentrant=False) for each in rows]
        return torch.cat(found).view(len(tokens_BS), -1)

    @torch.no_grad()
    def routes(self, tokens_BS: Tensor) -> Tensor:
        """Return the experts that each token but the last chooses, int32 [B, S - 1, L, K]. Collective."""
        found, shape = list[Tensor](), self._shape_of_routes(tokens_BS)

        def record(segments: Sequence[Segment], tensors: dict[str, Tensor], keep: tuple[str, ...]) -> Any:
            if not _has_router(segments):
                return self._execute(segments, tensors, keep)
            *results, expert_TK = self._execute(segments, tensors, (*keep, "experts"))
            found.append(expert_TK)
            return tuple(results)

        self._states(tokens_BS.to(self.device), record)
        return torch.stack(found, dim=1).view(shape)

    def step(self, batch: Any, loss_fn: Callable[["Trainer", Any], Tensor]) -> dict[str, float]:
        """Update the weights by the mean gradient of ``loss_fn(self, batch)`` over ranks. Syncs the device.

        A list is one micro-batch after the other, and the mean over them too. Losses of routers are added, as
        a mean over the calls of `log_probs`. Returns loss, grad_norm, lr, and skipped: 1.0 if loss or
        gradient was not finite. Collective.
        """
        optimizer, batches = self.optimizer, batch if isinstance(batch, list) else [batch]
        if scales := optimizer.scales:
            scales.begin()
        self._counts_LE.zero_()
        loss = torch.zeros((), device=self.device)
        for each in batches:
            self._router_losses.clear()
            self._num_calls = 0
            own = loss_fn(self, each) / len(batches)
            calls = max(self._num_calls, 1) * len(batches)
            routers = sum(self._router_losses, start=torch.zeros_like(own)) / calls
            ((own + routers) / self.plan.layout.dp).backward()
            loss += own.detach()
        group = self._mesh.group("world")
        total, counts_LE = sums(group, loss, self._counts_LE)
        result = optimizer.step(total)
        if scales:
            scales.update(result.finite)
        if self.plan.model.selection_bias and not self.plan.model.lora_rank:
            rate = self.plan.model.bias_update_rate
            for router, counts_E in zip(self.model.routers(), counts_LE, strict=True):
                update_selection_bias(router.selection_bias, counts_E, rate, result.finite)
        self._is_stale = group is not None
        self._execution.keep_code()
        values = total / self._ranks.size, result.grad_norm, result.lr, 1 - result.finite
        return dict(zip(("loss", "grad_norm", "lr", "skipped"), torch.stack(values).tolist(), strict=True))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of the Hugging Face folder, for an inference engine. Collective."""
        yield from ((entry.name, entry.make()) for entry in self._entries())

    def save_hf(self, folder: str | Path) -> None:
        """Write a folder that ``transformers`` reads. Collective. *Raises* ConfigError or OSError."""
        write_folder(self.plan, Path(folder), self.optimizer, self._ranks)

    def save(self, folder: str | Path, step: int) -> None:
        """Save weights, optimizer and random state as a checkpoint. Collective. *Raises* CheckpointError.

        The folder keeps the newest ``checkpoint.keep_last`` of them.
        """
        self._store(Path(folder)).save(step, self._state(step), wait=True)

    def load(self, folder: str | Path) -> int:
        """Load the newest checkpoint of `save`; return its step, or 0 if there is none. Collective."""
        state = self._state(0)
        if self._store(Path(folder)).load(state) is None:
            return 0
        self.optimizer.restored(state["optimizer"])
        restore_random_state(state["random"])
        self._is_stale = self._ranks.size > 1
        return int(state["step"])

    def _states(self, tokens_BS: Tensor, execute: Executor) -> tuple[Tensor, list[MoEOutput]]:
        if self._is_stale:
            self.optimizer.gather()
            self._is_stale = False
        return self.model.states(tokens_BS[:, :-1], execute)

    def _shape_of_routes(self, tokens_BS: Tensor) -> tuple[int, ...]:
        if not self.model.num_moe_layers:
            raise ConfigError("this model has no MoE layers, so its tokens have no routes")
        return len(tokens_BS), tokens_BS.shape[1] - 1, self.model.num_moe_layers, self.plan.model.top_k

    def _layers_of(self, routes_BSLK: Tensor, tokens_BS: Tensor) -> Tensor:
        shape, num_experts = self._shape_of_routes(tokens_BS), self.plan.model.num_experts
        if routes_BSLK.shape != shape or routes_BSLK.is_floating_point():
            given = f"{routes_BSLK.dtype} {list(routes_BSLK.shape)}".removeprefix("torch.")
            raise ConfigError(f"routes are {given}; they must be int32 {list(shape)}")
        ordered_BSLK = routes_BSLK.sort(dim=-1).values
        is_good_BSL = (ordered_BSLK.diff(dim=-1) > 0).all(dim=-1) & (ordered_BSLK[..., 0] >= 0)
        is_good_BSL = is_good_BSL & (ordered_BSLK[..., -1] < num_experts) | (routes_BSLK == -1).all(dim=-1)
        if bad := (~is_good_BSL).nonzero().tolist():
            raise ConfigError(
                f"routes{bad[0]} is {routes_BSLK[*bad[0]].tolist()}; it must be {shape[-1]} different "
                f"experts from 0 to {num_experts - 1}, or -1 in each place for the own choice"
            )
        return routes_BSLK.to(self.device, torch.int32).flatten(0, 1).transpose(0, 1)

    def _store(self, folder: Path) -> CheckpointStore:
        if folder not in self._stores:  # each has a process group
            self._stores[folder] = CheckpointStore(folder, self.plan.checkpoint)
            self._open.callback(self._stores[folder].close)
        return self._stores[folder]

    def _state(self, step: int) -> dict[str, Any]:
        model, optimizer = self.optimizer.model_state(), self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer, "random": random_state(), "step": step}

    def _entries(self) -> list[TensorToWrite]:
        self.optimizer.gather()
        own, at = self.model.state_dict(keep_vars=True), self.plan.layout
        whole: dict[str, Tensor] = {}

        def read(name: str, index: Index) -> Tensor:
            if name not in whole:
                if len(whole) == 3:  # an expert's tensors follow each other: a matrix and its adapters
                    whole.clear()
                whole[name] = own[name].detach()
                for cut in layout_of(own[name]).cuts:
                    if at.size(cut.axis) > 1:  # ep, along the first dimension
                        assert cut.dim == 0
                        mine = whole[name].contiguous()
                        whole[name] = mine.new_empty(at.size(cut.axis) * len(mine), *mine.shape[1:])
                        all_gather_into(whole[name], mine, group=self._mesh.group(cut.axis))
            return whole[name][index]

        dtypes = {name: weight.dtype for name, weight in own.items()}
        return hf_entries(self.plan.model, dtypes, read)[2]


def _with_own_loss(config: RunConfig) -> RunConfig:
    moe, passes = config.moe, config.passes
    if has_experts(config.model) and moe.receive_budget == MoEConfig.receive_budget:
        # no step of yours runs again because a receive buffer overflowed
        moe = replace(moe, receive_budget=WORST_CASE)
    if config.compile.enabled and not passes.disabled:
        passes = replace(passes, disabled=["fuse_loss"])
    return replace(config, moe=moe, passes=passes)


def _check(plan: Plan) -> None:
    parallel = plan.parallel
    for key, value, valid in (
        ("parallel.tp", parallel.tp, 1), ("parallel.etp", parallel.etp, 1), ("parallel.cp", parallel.cp, 1),
        ("parallel.pp", parallel.pp, 1), ("parallel.dp_shard", parallel.dp_shard.value, DpShard.zero1.value),
        ("graph.scope", plan.graph.scope, "none"), ("model.mtp_depth", plan.model.mtp_depth, 0),
        ("pipeline.ep_overlap", plan.ep_overlap, False),
        ("data.document_mask", plan.data.document_mask, False),
        *([("moe.receive_budget", plan.moe.receive_budget, WORST_CASE)] if has_experts(plan.model) else []),
    ):  # fmt: skip
        if value != valid:
            raise ConfigError(f"{key}={value}: graphmoe.Trainer runs {key}={valid} only")


def replaying(execute: Executor, experts_LTK: Iterable[Tensor]) -> Executor:
    """Return an executor that gives each router in turn int32 [T, K] in place of its choice; -1 keeps it."""
    layers = iter(experts_LTK)

    def run(
        segments: Sequence[Segment], tensors: dict[str, Tensor], keep: tuple[str, ...]
    ) -> tuple[Tensor, ...]:
        if not _has_router(segments):
            return execute(segments, tensors, keep)
        read = [replace(s, reads=(*s.reads, "replayed")) if s.name == ROUTER else s for s in segments]
        return execute(read, tensors | {"replayed": next(layers)}, keep)

    return run


def _has_router(segments: Sequence[Segment]) -> bool:
    return any(segment.name == ROUTER for segment in segments)
